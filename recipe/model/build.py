"""The stock Transformers model: built from config, padded for speed, saved without the padding.

Padding is a matter of training only. Rows `vocab_size` and up of the embedding matrix exist so that its matmuls
have a size the hardware likes; the loss leaves them out, so they start at zero, get no gradient and stay at zero.
Saved models do not have them: they can never be sampled, and GPT-2's own vocabulary gives GPT-2's own shapes.
"""

import difflib
import math
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.logging import disable_progress_bar

from recipe.config import TrainConfig
from recipe.errors import UserError, check_local_path
from recipe.model.size import padded_vocab_size
from recipe.model.weights import _zero_padding

# Stock "sdpa" builds an explicit causal mask when compiled (and, in eager mode, asks the device whether it may skip
# it), which keeps attention off the flash kernels (transformers#41856). The same function under a name that has no
# mask function gets attention_mask=None, and so is_causal=True. Saved configs do not hold the name.
SDPA_WITHOUT_MASK = "sdpa_without_mask"
AttentionInterface.register(SDPA_WITHOUT_MASK, sdpa_attention_forward)
ATTENTION = {"sdpa": SDPA_WITHOUT_MASK, "sdpa_with_mask": "sdpa", "eager": "eager"}  # ours -> Transformers'

# Pre-training on a corpus seen about once wants no dropout; GPT2Config's default is 0.1.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# What config_overrides may set: what it is, its types, its lowest and highest value.
_SIZE = ("a whole number", (int,), 1, 10**6)
_SHARE = ("a number", (int, float), 0, 0.99)
_POSITIVE = ("a number", (int, float), 1e-12, 10)
_SWITCH = ("true or false", (bool,), None, None)
OVERRIDES = {
    "n_layer": _SIZE,
    "n_head": _SIZE,
    "n_embd": _SIZE,
    "n_inner": _SIZE,
    "activation_function": ("a name", (str,), None, None),
    "resid_pdrop": _SHARE,
    "embd_pdrop": _SHARE,
    "attn_pdrop": _SHARE,
    "layer_norm_epsilon": _POSITIVE,
    "initializer_range": _POSITIVE,
    "scale_attn_weights": _SWITCH,
    "scale_attn_by_inverse_layer_idx": _SWITCH,
    "tie_word_embeddings": _SWITCH,
}
MANAGED = {
    "vocab_size": "it follows the tokenizer",
    "bos_token_id": "it follows the tokenizer",
    "eos_token_id": "it follows the tokenizer",
    "n_positions": "set block_size",
}


def build_model_config(
    config: TrainConfig, vocab_size: int, eos_token_id: int, source: str | Path | None = None
) -> PreTrainedConfig:
    """The model's config with its real vocabulary (as it is saved; `build_model` pads it).

    source: a folder or Hub id of a GPT-2 model whose shape is taken. Raises `UserError` if it cannot be used, and for
    overrides that are not GPT-2's shape, initialization or dropout, or are out of range.
    """
    overrides = config.config_overrides or {}
    for key, value in overrides.items():
        _check_override(key, value)
    if source is not None:
        return _config_of(source, config, vocab_size, eos_token_id)
    model_config = AutoConfig.for_model(
        config.model_type,
        vocab_size=vocab_size,
        n_positions=config.block_size,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        **{**NO_DROPOUT, **overrides},
    )
    if model_config.activation_function not in ACT2FN:
        raise UserError(f"config_overrides: there is no activation_function '{model_config.activation_function}'")
    if model_config.n_embd % model_config.n_head:
        heads = [n for n in range(1, model_config.n_embd + 1) if model_config.n_embd % n == 0 and n <= 64]
        raise UserError(
            f"n_embd {model_config.n_embd} is not divisible by n_head {model_config.n_head}; "
            f"n_head could be {', '.join(map(str, heads))}"
        )
    return model_config


def _config_of(source: str | Path, config: TrainConfig, vocab_size: int, eos_token_id: int) -> PreTrainedConfig:
    """The config of an existing model, with the run's vocabulary and dropout."""
    check_local_path(str(source))
    try:
        model_config = AutoConfig.from_pretrained(source)
    except Exception as error:  # missing file, unreachable Hub, a model type that is not known
        raise UserError(f"cannot load a model from '{source}': {' '.join(str(error).split())[:200]}") from error
    if model_config.model_type != config.model_type:
        raise UserError(f"the model in {source} is of type {model_config.model_type}; this recipe trains gpt2 only")
    overrides = config.config_overrides or {}
    if fixed := [
        key for key, value in overrides.items() if key not in NO_DROPOUT and getattr(model_config, key) != value
    ]:
        raise UserError(
            f"config_overrides: {', '.join(fixed)} cannot differ from the model in {source}; only dropout can "
            f"({', '.join(NO_DROPOUT)})"
        )
    if config.block_size > model_config.n_positions:
        remedy = f"pass --block_size {model_config.n_positions}, or less"
        if config.dataset_dir is not None:
            remedy = f"prepare the data with --tokenizer_name {source} --block_size {model_config.n_positions}"
        raise UserError(
            f"the model in {source} has {model_config.n_positions} positions, fewer than block_size "
            f"{config.block_size}; {remedy}"
        )
    if vocab_size > model_config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, more than the {model_config.vocab_size:,} of the model in "
            f"{source}; use the model's own tokenizer"
        )
    ids = {"vocab_size": vocab_size, "bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
    model_config.update({**ids, **NO_DROPOUT, **overrides})
    return model_config


def _check_override(key: str, value: object) -> None:
    if key in MANAGED:
        raise UserError(f"config_overrides must not set {key}: {MANAGED[key]}")
    if key not in OVERRIDES:
        nearest = difflib.get_close_matches(key, OVERRIDES, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"it may set {', '.join(OVERRIDES)}"
        raise UserError(f"config_overrides has no '{key}'; {hint}")
    name, kinds, low, high = OVERRIDES[key]
    right_kind = isinstance(value, kinds) and (kinds == (bool,) or not isinstance(value, bool))
    if not right_kind or (low is not None and not low <= value <= high):
        limits = "" if low is None else f" from {low} to {high}"
        raise UserError(f"config_overrides: {key} must be {name}{limits}, got {value!r}")


def _load_pretrained(source: str | Path, real_config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """An existing model in fp32, with its own vocabulary. Raises `UserError` if weights are missing or misshapen."""
    options = {key: getattr(real_config, key) for key in NO_DROPOUT}
    disable_progress_bar()  # a bar for loading weights that takes milliseconds
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            attn_implementation=ATTENTION[attn_implementation],
            dtype=torch.float32,
            use_cache=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # the Hub, the file system, safetensors and transformers each raise their own
        raise UserError(f"cannot load a model from '{source}': {' '.join(str(error).split())[:200]}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(f"the model in {source} lacks weights: {', '.join(missing[:3])}")
    return model


def build_model(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    attn_implementation: str = "sdpa",
    bf16_residual: bool = False,
    source: str | Path | None = None,
) -> PreTrainedModel:
    """A model in fp32 with a padded vocabulary, randomly initialized (GPT-2's scaled init is Transformers' own).

    attn_implementation, bf16_residual: config's, resolved. source: a folder or Hub id whose weights are taken instead.
    The initial weights do not depend on the padding.
    """
    real_config = type(model_config).from_dict({**model_config.to_dict(), "use_cache": False})
    if source is None:
        model = AutoModelForCausalLM.from_config(
            real_config, attn_implementation=ATTENTION[attn_implementation], dtype=torch.float32
        )
    else:
        model = _load_pretrained(source, real_config, attn_implementation)
    padded = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    if padded != model.config.vocab_size:
        model.resize_token_embeddings(padded, mean_resizing=False)
    _zero_padding(model, model_config.vocab_size)
    if bf16_residual:  # what the blocks add to it is bf16 under autocast already, but fp32 + bf16 is fp32
        model.base_model.drop.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    if config.activation_checkpointing:
        # Renamed since transformers 5.17; the old name warns in 5.23 and goes in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


class SigmoidGELU(nn.Module):
    """GPT-2's gelu_new, 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2u).

    The two are equal, since 1 + tanh(u) = 2 sigmoid(2u).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def use_sigmoid_gelu(model: PreTrainedModel) -> None:
    """Compute the blocks' gelu_new by `SigmoidGELU`; the model's config stays as it is."""
    for block in model.base_model.h:
        block.mlp.act = SigmoidGELU()
