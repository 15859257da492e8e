"""The stock Transformers model: built from config, padded for speed, saved without the padding.

Padding is a matter of training only. Rows `vocab_size` and up of the embedding matrix exist so that its matmuls
have a size the hardware likes; the loss leaves them out, so they start at zero, get no gradient and stay at zero.
Saved models do not have them: they can never be sampled, and GPT-2's own vocabulary gives GPT-2's own shapes.
"""

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipe.config import TrainConfig, UserError

# Stock "sdpa" builds an explicit causal mask when compiled (and, in eager mode, asks the device whether it may skip
# it), which keeps attention off the flash kernels (transformers#41856). The same function under a name that has no
# mask function gets attention_mask=None, and so is_causal=True. Saved configs do not hold the name.
SDPA_WITHOUT_MASK = "sdpa_without_mask"
AttentionInterface.register(SDPA_WITHOUT_MASK, sdpa_attention_forward)

WEIGHTS_NAME = "model.safetensors"


def build_model_config(config: TrainConfig, vocab_size: int, eos_token_id: int) -> PreTrainedConfig:
    """The model's config with its real vocabulary (as it is saved; `build_model` pads it).

    Raises `UserError` for overrides the model class does not know, or that the recipe sets itself.
    """
    overrides = config.config_overrides or {}
    managed = {
        "vocab_size": "it follows the tokenizer",
        "n_positions": "set block_size",
        "bos_token_id": "it follows the tokenizer",
        "eos_token_id": "it follows the tokenizer",
        "use_cache": "it is set for generation",
        "add_cross_attention": "a language model has no encoder",
    }
    for key in overrides:
        if key in managed:
            raise UserError(f"config_overrides must not set {key}: {managed[key]}")
    known = AutoConfig.for_model(config.model_type, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0)
    for key in overrides:
        if key not in known.to_dict():
            raise UserError(f"config_overrides: {type(known).__name__} has no '{key}'")
    # Pre-training on a corpus seen about once wants no dropout; GPT2Config's default is 0.1.
    values = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **overrides}
    try:
        model_config = AutoConfig.for_model(
            config.model_type,
            vocab_size=vocab_size,
            n_positions=config.block_size,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            **values,
        )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"config_overrides {overrides}: {' '.join(str(error).split())}") from error
    for key in ("n_layer", "n_embd", "n_head"):
        if getattr(model_config, key) < 1:
            raise UserError(f"config_overrides: {key} must be at least 1, got {getattr(model_config, key)}")
    if model_config.activation_function not in ACT2FN:
        raise UserError(f"config_overrides: there is no activation_function '{model_config.activation_function}'")
    if model_config.n_embd % model_config.n_head:
        heads = [n for n in range(1, model_config.n_embd + 1) if model_config.n_embd % n == 0 and n <= 64]
        raise UserError(
            f"n_embd {model_config.n_embd} is not divisible by n_head {model_config.n_head}; "
            f"n_head could be {', '.join(map(str, heads))}"
        )
    return model_config


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """50257 -> 50304 for a multiple of 128."""
    return -(-vocab_size // multiple) * multiple


def build_model(config: TrainConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Randomly initialised model in fp32 with a padded vocabulary (GPT-2's scaled init is Transformers' own)."""
    attention = SDPA_WITHOUT_MASK if config.attn_implementation == "sdpa" else config.attn_implementation
    padded = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    padded_config = type(model_config).from_dict({**model_config.to_dict(), "vocab_size": padded, "use_cache": False})
    model = AutoModelForCausalLM.from_config(padded_config, attn_implementation=attention, dtype=torch.float32)
    _zero_padding(model, model_config.vocab_size)
    if config.activation_checkpointing:
        # Renamed since transformers 5.17; the old name warns in 5.23 and goes in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def save_model(model: PreTrainedModel, model_config: PreTrainedConfig, directory: Path) -> None:
    """Write config, generation config and weights of the unpadded model, in Transformers' layout.

    model: the padded model, unwrapped. model_config: the one from `build_model_config`.
    """
    vocab_size = model_config.vocab_size
    model_config.architectures = [type(model).__name__]
    model_config.dtype = "float32"
    model_config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=model_config.bos_token_id,
        eos_token_id=model_config.eos_token_id,
        pad_token_id=model_config.eos_token_id,
        do_sample=True,
    ).save_pretrained(directory)
    weights = {
        name: tensor[:vocab_size] if _is_vocabulary(model, tensor) else tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not (model_config.tie_word_embeddings and name == "lm_head.weight")
    }
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(weights, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / WEIGHTS_NAME).chmod(0o644)  # safetensors makes its files private (0.8)


def load_weights(model: PreTrainedModel, directory: Path, vocab_size: int) -> None:
    """Put weights written by `save_model` into a padded model, exactly as they were when saved."""
    weights = load_file(directory / WEIGHTS_NAME)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in weights:
                (tensor[:vocab_size] if _is_vocabulary(model, tensor) else tensor).copy_(weights[name])
    _zero_padding(model, vocab_size)


def _is_vocabulary(model: PreTrainedModel, tensor: torch.Tensor) -> bool:
    return tensor is model.get_input_embeddings().weight or tensor is model.get_output_embeddings().weight


def _zero_padding(model: PreTrainedModel, vocab_size: int) -> None:
    with torch.no_grad():
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            assert isinstance(embeddings, (nn.Embedding, nn.Linear))
            embeddings.weight[vocab_size:] = 0


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Parameters of the model as it is saved, tied ones once."""
    return sum(p[:vocab_size].numel() if _is_vocabulary(model, p) else p.numel() for p in model.parameters())
