"""Attention without a mask, and the check that a model other than GPT-2 is correct with it and with this recipe."""

import copy
import dataclasses

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from recipe.errors import UserError, did_you_mean, short_reason

# Stock "sdpa" builds an explicit causal mask under torch.compile, and in eager mode asks the device whether it may
# skip the mask. Both keep attention off the flash kernels (transformers#41856). Under a name without a mask function,
# the same function gets attention_mask=None and therefore is_causal=True. Saved configs do not contain the name.
SDPA_WITHOUT_MASK = "sdpa_without_mask"
AttentionInterface.register(SDPA_WITHOUT_MASK, sdpa_attention_forward)


def check_model_type(model_type: str) -> None:
    """Raise `UserError` if Transformers has no causal language model of this type."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or CONFIG_MAPPING[model_type].model_type != model_type:
        nearest = did_you_mean(model_type, {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {model_type}, otherwise="try llama")
        raise UserError(f"Transformers has no causal language model of type '{model_type}'; {nearest}")
    config_class = CONFIG_MAPPING[model_type]
    if "max_position_embeddings" not in {f.name for f in dataclasses.fields(config_class)} | {
        *config_class.attribute_map
    }:
        raise UserError(f"model_type {model_type} is not supported: its config has no max_position_embeddings")


def check_decoder(model_config: PreTrainedConfig, block_size: int) -> None:
    """Raise `UserError` unless attention without a mask, the loss, the counts and the export are right for a model.

    Shapes are read from the model on the meta device. The rest is tried on two of its layers, on the CPU.
    """
    name = model_config.model_type
    check_model_type(name)
    try:
        reason = _why_unsupported(model_config, block_size)
    except Exception as error:  # each model type fails in its own way on a bad shape
        raise UserError(
            f"model_type {name} does not work with these config_overrides: {short_reason(error)}"
        ) from error
    if reason is not None:
        raise UserError(f"model_type {name} is not supported: {reason}; use a dense causal decoder, such as llama")


def _why_unsupported(model_config: PreTrainedConfig, block_size: int) -> str | None:
    if model_config.is_encoder_decoder:
        return "it has an encoder"
    window = getattr(model_config, "sliding_window", None)
    if window is not None and window < block_size:
        return f"its sliding window of {window} tokens requires a mask for rows of {block_size}"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    if not (model._supports_sdpa and model.supports_gradient_checkpointing):
        return "Transformers has no sdpa or no activation checkpointing for it"
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Conv1D, nn.Embedding))]
    weights = {layer.weight for layer in layers}
    if others := [key for key, p in model.named_parameters() if p.dim() > 1 and p not in weights]:
        return f"{others[0]} is neither an embedding nor the weight of a linear layer"
    if (reason := _why_wrong_without_mask(model_config)) is not None:
        return reason
    return None if model.get_output_embeddings().bias is None else "its output layer has a bias"


@torch.no_grad()
def _why_wrong_without_mask(model_config: PreTrainedConfig) -> str | None:
    """Compare two layers with random weights, run as `LanguageModelingLoss` does, with the stock masked model."""
    small = copy.deepcopy(model_config)
    small.num_hidden_layers, small.vocab_size = 2, 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"attn_implementation": SDPA_WITHOUT_MASK, "dtype": torch.float32}
        model = AutoModelForCausalLM.from_config(small, **options).eval()
        for p in model.parameters():
            if p.dim() > 1:  # large enough that attention is far from uniform, and a cap on its scores visible
                p.normal_(0, 2 / p.shape[1] ** 0.5)
        ids = torch.randint(0, 64, (1, 8))
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 64
    logits, others = (
        model.get_output_embeddings()(model.base_model(input_ids=row, use_cache=False)[0]) for row in (ids, changed)
    )
    model.set_attn_implementation("eager")
    stock = model(input_ids=ids, use_cache=False).logits
    tolerance = 1e-4 * stock.abs().max()
    if not stock.isfinite().all():
        return "its logits are not finite"
    if (logits - others)[:, :-1].abs().max() > tolerance:
        return "its tokens see later ones"
    if (logits - stock).abs().max() > tolerance:
        return "its logits need more than causal attention and an output matrix"
    return None
