"""Build the stock Transformers model from a config or from existing weights, with a padded vocabulary.

The padding exists only during training. It gives the matmuls with the embedding matrix a size that runs fast. The
loss ignores the rows from `vocab_size` up, so they start at zero, get no gradient and stay at zero. Saved models do
not have these rows: the model can never sample them, and GPT-2's vocabulary results in GPT-2's own shapes.
"""

import copy
import dataclasses
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from recipe.config import TrainConfig
from recipe.errors import UserError, did_you_mean, one_line
from recipe.model.attention import SDPA_WITHOUT_MASK, check_decoder, check_model_type
from recipe.model.size import padded_vocab_size
from recipe.model.weights import load_pretrained, zero_padding

ATTENTION = {"sdpa": SDPA_WITHOUT_MASK, "eager": "eager"}  # our name -> Transformers' name

# A model that sees its corpus about once needs no dropout; GPT2Config's default is 0.1.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# What config_overrides can set. Checkpoints store the values under these names.
MODEL_OPTIONS = (
    *("n_layer", "n_head", "n_embd", "n_inner", "activation_function", *NO_DROPOUT),
    *("layer_norm_epsilon", "initializer_range", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    "tie_word_embeddings",
)
MANAGED = dict.fromkeys(("n_positions", "max_position_embeddings"), "set block_size")
MANAGED |= dict.fromkeys(("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"), "it follows the tokenizer")
# Transformers' names of what config_overrides must set for types other than GPT-2, whose defaults are large models.
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")


def model_options(model_type: str) -> tuple[str, ...]:
    """Return what config_overrides can set: for types other than GPT-2, all that the type's config adds to others."""
    if model_type == "gpt2":
        return MODEL_OPTIONS
    check_model_type(model_type)
    config_class = CONFIG_MAPPING[model_type]
    names, common = ({option.name for option in dataclasses.fields(c)} for c in (config_class, PreTrainedConfig))
    return tuple(sorted((names | config_class.attribute_map.keys()) - common - MANAGED.keys()))


def _no_dropout(model_type: str) -> dict[str, float]:
    return {name: 0.0 for name in model_options(model_type) if name.endswith(("_pdrop", "dropout"))}


def build_model_config(
    config: TrainConfig, vocab_size: int, eos_token_id: int, source: str | Path | None = None
) -> PreTrainedConfig:
    """Return the model's config with its real vocabulary, as it is saved; `build_model` pads it.

    source: folder or Hub id of a model that sets the shape. Raises `UserError` if that model cannot be used, or
    if config_overrides has an unknown name, a wrong type or a value out of range.
    """
    overrides = config.config_overrides or {}
    options, no_dropout = model_options(config.model_type), _no_dropout(config.model_type)
    for key in overrides:
        if key not in options:
            nearest = did_you_mean(key, options, otherwise=f"it can set {', '.join(options)}")
            raise UserError(f"config_overrides cannot set '{key}'; {MANAGED.get(key, nearest)}")
    missing = [key for key in SHAPE if key not in overrides and (key in options or key in SHAPE[:3])]
    if missing and source is None and config.model_type != "gpt2":
        raise UserError(f"model_type {config.model_type} requires {', '.join(missing)} in config_overrides")
    token_ids = {"vocab_size": vocab_size, "bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
    if config.model_type != "gpt2":
        token_ids["pad_token_id"] = None  # its embedding would get no gradient
    values = {**token_ids, **no_dropout, **overrides}
    try:
        if source is None:
            model_config = AutoConfig.for_model(config.model_type, max_position_embeddings=config.block_size, **values)
        else:
            model_config = _load_config(source, config, vocab_size)
            model_config.update(values)
    except StrictDataclassError as error:
        raise UserError(f"config_overrides: {one_line(error.__cause__).partition('. Errors')[0]}") from error
    for key in overrides:
        value = getattr(model_config, key)
        low, high = (0, 0.99) if key in no_dropout else (1e-12, 10) if isinstance(value, float) else (1, 10**6)
        checked = key in (*no_dropout, *SHAPE) or config.model_type == "gpt2"
        if checked and type(value) in (int, float) and not low <= value <= high:  # NaN is in no range
            raise UserError(f"config_overrides: {key} must be from {low:,} to {high:,}, got {value}")
    if config.model_type != "gpt2":
        check_decoder(model_config, config.block_size)
        return model_config
    if model_config.activation_function not in ACT2FN:
        raise UserError(f"config_overrides: no activation_function is named '{model_config.activation_function}'")
    width, num_heads = model_config.hidden_size, model_config.num_attention_heads
    if width % num_heads:
        divisors = ", ".join(str(n) for n in range(1, 65) if width % n == 0)
        raise UserError(f"n_embd {width} is not divisible by n_head {num_heads}; n_head could be {divisors}")
    return model_config


def _load_config(source: str | Path, config: TrainConfig, vocab_size: int) -> PreTrainedConfig:
    """Return an existing model's config. Raises `UserError` if it does not fit the run's options and vocabulary."""
    model_config = load_pretrained(AutoConfig, source)
    if model_config.model_type != config.model_type:
        raise UserError(
            f"the model in {source} has type {model_config.model_type}, but --model_type is {config.model_type}"
        )
    no_dropout = _no_dropout(config.model_type)
    overrides = {key: value for key, value in (config.config_overrides or {}).items() if key not in no_dropout}
    if fixed := [key for key, value in overrides.items() if getattr(model_config, key) != value]:
        only = f"only dropout can ({', '.join(no_dropout)})"
        raise UserError(f"config_overrides: {', '.join(fixed)} cannot differ from the model in {source}; {only}")
    if config.block_size > (most := model_config.max_position_embeddings):
        remedy = f"pass --block_size {most} or less"
        if config.dataset_dir is not None:
            remedy = f"prepare the data with --tokenizer_name {source} --block_size {most}"
        raise UserError(
            f"the model in {source} has {most} positions, fewer than block_size {config.block_size}; {remedy}"
        )
    if vocab_size > (most := model_config.vocab_size):
        found = f"the tokenizer has {vocab_size:,} tokens, more than the {most:,} of the model in {source}"
        raise UserError(f"{found}; use the model's own tokenizer")
    return model_config


def build_model(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    attn_implementation: str = "sdpa",
    source: str | Path | None = None,
) -> PreTrainedModel:
    """Return an fp32 model with a padded vocabulary and random weights (Transformers does GPT-2's scaled init).

    attn_implementation: the resolved value of config's option. source: folder or Hub id to load the weights from
    instead; raises `UserError` if it lacks weights. The initial weights do not depend on the padding.
    """
    options = {"attn_implementation": ATTENTION[attn_implementation], "dtype": torch.float32}
    if source is None:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), **options)
    else:
        options |= {key: getattr(model_config, key) for key in ("pad_token_id", *_no_dropout(config.model_type))}
        model, loaded = load_pretrained(AutoModelForCausalLM, source, output_loading_info=True, **options)
        if missing := sorted(loaded["missing_keys"]):
            raise UserError(f"the model in {source} lacks weights: {', '.join(missing[:3])}")
        model.train()  # `from_pretrained` returns a model in eval mode, in which a trial step would use less memory
    padded = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    if padded != model.config.vocab_size:
        model.resize_token_embeddings(padded, mean_resizing=False)
    zero_padding(model, model_config.vocab_size)
    if config.bf16_residual:  # under autocast the blocks add bf16 to the residual stream, but fp32 + bf16 is fp32
        residual_source(model).register_forward_hook(lambda module, inputs, output: output.bfloat16())
    if config.activation_checkpointing == "true":
        # Transformers renamed the method after 5.17; the old name warns in 5.23 and disappears in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def residual_source(model: PreTrainedModel) -> nn.Module:
    """Return the module whose output enters the first block."""
    return model.base_model.drop if model.config.model_type == "gpt2" else model.get_input_embeddings()
