"""Build the stock Transformers model from a config or from existing weights, with a padded vocabulary.

The padding exists only during training. It gives the matmuls with the embedding matrix a size that runs fast. The loss
masks its logits, so its rows get no gradient and never matter. Saved models do not have these rows: the model cannot
sample them, and GPT-2's vocabulary results in GPT-2's own shapes.
"""

import copy
import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipe.config import TrainConfig
from recipe.data.tokenizer import list_ids
from recipe.errors import UserError, did_you_mean, short_reason
from recipe.model.check import check_model, have_equal_logits
from recipe.model.files import new_generation_config
from recipe.model.size import count_flops_per_token, count_parameters, padded_vocab_size
from recipe.model.weights import is_vocabulary, load_model_weights, load_pretrained

# Stock "sdpa" builds an explicit causal mask under torch.compile, and in eager mode asks the device whether it may
# skip the mask. Both keep attention off the flash kernels (transformers#41856). Under a name without a mask function,
# the same function gets attention_mask=None and therefore is_causal=True. Saved configs do not contain the name.
SDPA_WITHOUT_MASK = "sdpa_without_mask"
AttentionInterface.register(SDPA_WITHOUT_MASK, sdpa_attention_forward)

# What config_overrides cannot set.
MANAGED: dict[str, str] = dict.fromkeys(("n_positions", "max_position_embeddings"), "set block_size")
MANAGED |= dict.fromkeys(("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"), "it follows the tokenizer")
ROPE = {"rope_theta": """pass '{"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}'"""}
# What config_overrides must set for types other than GPT-2, whose defaults are models of 7B parameters.
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")
# GPT-2's names of dropout, which recipes use, and those of other types.
DROPOUT = {"attn_pdrop": "attention_dropout", "resid_pdrop": "hidden_dropout", "embd_pdrop": "embedding_dropout"}


def model_options(model_type: str) -> list[str]:
    """Return what config_overrides can set: what this type's config adds to the common one.

    Types are those of Transformers, and those that a module has registered with its Auto classes.
    """
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        nearest = did_you_mean(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, otherwise="try llama")
        problem = f"Transformers has no causal language model of type '{model_type}', and no module registered one"
        raise UserError(f"{problem}; {nearest}")
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)}
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names |= config_class.attribute_map.keys() | inspect.signature(config_class).parameters.keys() - {"kwargs"}
    reason = None
    if "max_position_embeddings" not in names:
        reason = "its config has no max_position_embeddings"
    elif "num_experts_per_tok" in names:  # such models need a loss of their own
        reason = "it is a mixture of experts"
    if reason is not None:
        raise UserError(f"model_type {model_type} is not supported: {reason}; use a dense decoder, such as llama")
    return sorted(names - common - MANAGED.keys())


def _no_dropout(model_type: str) -> dict[str, float]:
    """A model that sees its corpus about once needs no dropout; GPT2Config's default is 0.1."""
    return {name: 0.0 for name in model_options(model_type) if name.endswith(("_pdrop", "dropout"))}


def translate_dropout(overrides: dict[str, Any], options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return config_overrides with this type's names of dropout, and the names of GPT-2's dropout that it lacks.

    options: from `model_options`.
    """
    translated = {}
    missing = []
    for key, value in overrides.items():
        name = key if key in options else DROPOUT.get(key, key)
        if key in DROPOUT and name not in options:
            missing.append(key)
        else:
            translated[name] = value
    return translated, missing


def build_model_config(
    config: TrainConfig,
    vocab_size: int,
    eos_token_id: int,
    source: str | Path | None = None,
    num_base_tokens: int = 0,
    bos_token_id: int | None = None,
) -> PreTrainedConfig:
    """Return the model's config with its real vocabulary, as saved; `build_model` pads it.

    eos_token_id: ends the documents of the training text. source: folder or Hub id of a model that sets the shape, and
    the special ids if eos_token_id is one of its own. num_base_tokens: size of the vocabulary without added tokens,
    which the model may lack. bos_token_id: begins documents; by default, eos_token_id.

    Raises `UserError` if that model cannot be used, or if config_overrides has an unknown name or describes a model
    that cannot be built or trained right.
    """
    model_config = None if source is None else load_pretrained(AutoConfig, source)
    model_type = config.model_type or (model_config.model_type if model_config else "gpt2")
    options = model_options(model_type)
    overrides, _ = translate_dropout(config.config_overrides or {}, options)
    for key in overrides:
        if key not in options:
            nearest = did_you_mean(key, options, otherwise=f"it can set {', '.join(options)}")
            raise UserError(f"config_overrides cannot set {key!r}; {(MANAGED | ROPE).get(key, nearest)}")
    aliases = CONFIG_MAPPING[model_type].attribute_map
    is_gpt2 = issubclass(CONFIG_MAPPING[model_type], GPT2Config)
    for alias, key in aliases.items():
        if {alias, key} <= overrides.keys():
            raise UserError(f"config_overrides sets {key} and {alias}, two names of the same; pass {key}")
    missing = [key for key in SHAPE if key in options and {key, aliases.get(key)}.isdisjoint(overrides)]
    if missing and source is None and not is_gpt2:
        raise UserError(f"model_type {model_type} requires {', '.join(missing)} in config_overrides")
    values = {"vocab_size": vocab_size, **_no_dropout(model_type), **overrides}
    begin = eos_token_id if bos_token_id is None else bos_token_id
    ids: dict[str, int | None] = {"bos_token_id": begin, "eos_token_id": eos_token_id}
    if not is_gpt2:
        ids["pad_token_id"] = None  # its embedding would get no gradient
    if source is not None and model_config is not None:
        _check_source(model_config, model_type, overrides, source, config, num_base_tokens)
    try:
        if model_config is None:
            model_config = AutoConfig.for_model(model_type, max_position_embeddings=config.block_size, **values, **ids)
        else:
            is_own = eos_token_id in list_ids(model_config.eos_token_id)
            model_config.update(values if is_own else values | ids)
        # On the meta device, before text is prepared for hours. Each type reports a bad shape with its own exception.
        count_flops_per_token(model_config, count_parameters(model_config), config.block_size)
    except Exception as error:
        reason = short_reason(error.__cause__ or error)
        name = str(error.args[0]) if error.args else ""
        if isinstance(error, KeyError) and name in overrides.values():
            reason = f"Transformers has no {name!r}; {did_you_mean(name, ACT2FN, otherwise='try gelu_new')}"
        raise UserError(f"config_overrides describe a {model_type} that cannot be built: {reason}") from error
    check_model(model_config, attention_of(config, model_config))
    return model_config


def attention_of(config: TrainConfig, model_config: PreTrainedConfig) -> str:
    """Return the attention function: sdpa without a mask where that is equal, as in GPT-2, llama and qwen3.

    It is not where a mask also hides what is far away (mistral's window, which is tried as if it were short), or where
    the type has attention of its own (falcon).
    """
    attention = config.attn_implementation if config.attn_implementation != "auto" else "sdpa"
    is_equal = attention == "sdpa" and have_equal_logits(model_config, attention, SDPA_WITHOUT_MASK)
    return SDPA_WITHOUT_MASK if is_equal else attention


def _check_source(
    model_config: PreTrainedConfig,
    model_type: str,
    overrides: dict[str, Any],
    source: str | Path,
    config: TrainConfig,
    num_tokens: int,
) -> None:
    """Raise `UserError` if an existing model does not fit the run's options, or has fewer than num_tokens tokens."""
    if model_config.model_type != model_type:
        raise UserError(f"the model in {source} has type {model_config.model_type}; omit --model_type {model_type}")
    no_dropout = _no_dropout(model_type)
    for key, value in overrides.items():
        if key not in no_dropout and getattr(model_config, key) != value:
            raise UserError(f"config_overrides: {key} cannot differ from the model in {source}; only dropout can")
    most = model_config.max_position_embeddings
    if config.block_size > most:
        problem = f"the model in {source} has {most} positions, fewer than block_size {config.block_size}"
        raise UserError(f"{problem}; pass --block_size {most}")
    if num_tokens > model_config.vocab_size:
        problem = f"the tokenizer has {num_tokens:,} tokens, more than the {model_config.vocab_size:,} of the model"
        raise UserError(f"{problem} in {source}; pass the model's own --tokenizer_name, to which tokens may be added")


def build_model(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    source: str | Path | None = None,
) -> PreTrainedModel:
    """Return an fp32 model with a padded vocabulary and random weights (Transformers does GPT-2's scaled init).

    source: folder or Hub id to load the weights from instead; raises `UserError` if it lacks weights. The initial
    weights do not depend on the padding.
    """
    is_gpt2 = isinstance(model_config, GPT2Config)
    options = {"attn_implementation": attention_of(config, model_config), "dtype": torch.float32}
    if source is None:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config), **options)
        model.generation_config = new_generation_config(model_config)  # for samples
    else:
        options |= {key: getattr(model_config, key) for key in _no_dropout(model_config.model_type)}
        if not is_gpt2:
            options["pad_token_id"] = None  # its embedding would get no gradient
        model = load_model_weights(source, **options)
        model.train()  # `from_pretrained` returns a model in eval mode, in which a trial step would use less memory
    num_known = model.config.vocab_size
    padded = padded_vocab_size(model_config.vocab_size, config.pad_vocab_to_multiple_of)
    if padded != num_known:
        model.resize_token_embeddings(padded, mean_resizing=False)
    if model_config.vocab_size > num_known:  # tokens were added
        for tensor in model.parameters():
            if is_vocabulary(model, tensor):  # Transformers draws rows around the mean, which no run could repeat
                tensor.data[num_known : model_config.vocab_size] = tensor.data[:num_known].mean(dim=0)
    if config.bf16_residual:  # under autocast the blocks add bf16 to the residual stream, but fp32 + bf16 is fp32
        into_first_block = model.base_model.get_submodule("drop") if is_gpt2 else model.get_input_embeddings()
        into_first_block.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    if config.activation_checkpointing == "true":
        # Transformers renamed the method after 5.17; the old name warns in 5.23 and disappears in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model
