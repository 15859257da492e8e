"""Try a small copy of a model before training: a model that sees the answer, or gets a wrong loss, only looks good."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from recipe.errors import UserError, short_reason
from recipe.model.loss import LanguageModelingLoss, own_losses

# Of the copy.
NUM_TOKENS = 12
VOCAB_SIZE = 37
PADDED_SIZE = 41
MAX_PARAMETERS = 50_000_000
TOLERANCE = 1e-4  # in fp32; of 110 types, the losses of right ones differ by 0 nats, of wrong ones by 6 and more

_FAULTS: dict[str, str | None] = {}  # a run asks several times
_EQUAL: dict[str, bool] = {}


def check_model(model_config: PreTrainedConfig, attention: str) -> None:
    """Raise `UserError` unless a model of this config would be trained and evaluated right.

    A small copy with random weights is tried: no token sees later ones, the loss of `LanguageModelingLoss` is the
    cross-entropy of the model's own logits, every parameter gets a gradient, and padding of the vocabulary changes no
    loss. The trial takes a twentieth of a second and leaves PyTorch's random state as it was. attention: the name of
    one of Transformers' attention functions.
    """
    key = f"{attention} {vars(model_config)}"
    if key not in _FAULTS:
        _FAULTS[key] = _find_fault(model_config, attention)
    if _FAULTS[key] is not None:
        raise UserError(f"model_type {model_config.model_type} is not supported: {_FAULTS[key]}")


def have_equal_logits(model_config: PreTrainedConfig, *attention: str) -> bool:
    """Return whether a small copy has the same logits with two attention functions; False if it fails with one."""
    key = f"{attention} {vars(model_config)}"
    if key not in _EQUAL:
        _EQUAL[key] = False
        rows = torch.arange(NUM_TOKENS)[None]
        logits = []
        with contextlib.suppress(Exception), torch.no_grad():
            for name in attention:
                with _seeded():
                    logits.append(_build_copy(shrink(model_config), name)(input_ids=rows, use_cache=False).logits)
            _EQUAL[key] = torch.allclose(*logits, rtol=0, atol=TOLERANCE)
    return _EQUAL[key]


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Build and try models on the CPU, with the same random numbers each time."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed a GPU too
        yield


def _find_fault(model_config: PreTrainedConfig, attention: str) -> str | None:
    try:
        with _seeded():
            fault = _try(_build_copy(shrink(model_config), attention))
    except Exception as error:  # each type reports what it lacks with its own exception
        if attention != "eager":
            otherwise = f"its {attention} attention fails; pass --attn_implementation eager"
            return _find_fault(model_config, "eager") or otherwise
        fault = f"a small copy of it fails ({short_reason(error)})"
    return None if fault is None else f"{fault}; use a dense decoder, such as llama"


def _build_copy(tiny: PreTrainedConfig, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(copy.deepcopy(tiny)).num_parameters()
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the smallest copy has {num_parameters:,} parameters")
    model = AutoModelForCausalLM.from_config(tiny, attn_implementation=attention, dtype=torch.float32)
    for parameter in model.parameters():  # no weight is zero, tokens depend on others, and logits are large
        parameter.data.add_(torch.randn_like(parameter), alpha=1.0 if len(parameter) == VOCAB_SIZE else 0.1)
    return model.eval()


def _try(model: PreTrainedModel) -> str | None:
    """Return the first fault of the copy."""
    if sees_later_tokens(model):
        return "its tokens see later ones"
    rows = torch.arange(NUM_TOKENS + 1)[None]
    input_ids, targets = rows[:, :-1], rows[:, 1:]
    outputs = LanguageModelingLoss(model, VOCAB_SIZE).eval()(input_ids, targets)
    losses = outputs["losses"]
    if not torch.allclose(losses, own_losses(model, input_ids, targets)["losses"], rtol=0, atol=TOLERANCE):
        return "its logits are scaled or capped, which the loss ignores (final_logit_softcapping=null removes a cap)"
    outputs["loss"].backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        return f"{len(unused)} of its tensors get no gradient, such as {unused[0]}"
    model.resize_token_embeddings(PADDED_SIZE, mean_resizing=False)
    padded = LanguageModelingLoss(model, VOCAB_SIZE).eval()(input_ids, targets)["losses"]
    if not torch.allclose(losses, padded, rtol=0, atol=TOLERANCE):
        return "its vocabulary cannot be padded"
    return None


def shrink(model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a copy with narrow heads, one layer of each kind, and few tokens and positions."""
    tiny = copy.deepcopy(model_config)
    num_layers = model_config.num_hidden_layers
    head_dim = getattr(tiny, "head_dim", None) or tiny.hidden_size // tiny.num_attention_heads
    factor = 1  # by which all widths shrink
    while head_dim % (16 * factor) == 0:  # to a multiple of 8, so that a part for rotary embeddings is even
        factor *= 2
    kinds = getattr(tiny, "layer_types", None) or [None] * num_layers
    layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for name, value in list(vars(tiny).items()):
        is_count = any(part in name for part in ("layer", "heads", "n_head"))
        if "layer" in name and isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(tiny, name, [value[i] for i in layers])
        elif type(value) is int and "window" in name and not is_count:
            setattr(tiny, name, NUM_TOKENS // 2)  # so that it hides tokens
        elif type(value) is int and value >= 16 and value % factor == 0 and not is_count:
            setattr(tiny, name, value // factor)
    if getattr(tiny, "rope_parameters", None):
        tiny.rope_parameters = _without_scaling(tiny.rope_parameters)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    size = {"num_hidden_layers": len(layers), "vocab_size": VOCAB_SIZE, "max_position_embeddings": NUM_TOKENS}
    tiny.update(ids | size)
    return tiny


def _without_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Return parameters of rotary embeddings without scaling, which may have a value per dimension."""
    rope = {key: _without_scaling(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if "rope_type" in rope:
        rope["rope_type"] = "default"
    return rope


@torch.no_grad()
def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether changing the last token changes what a model predicts before it.

    A change counts if it exceeds a hundredth of the logits' spread, because int8 rounds the tokens of a batch
    together. Of 110 types, causal ones change by 5e-7 at most, others by 0.05 and more.
    """
    rows = torch.arange(min(NUM_TOKENS, model.config.max_position_embeddings), device=model.device).repeat(2, 1)
    rows[1, -1] = 0
    logits = model(input_ids=rows % model.config.vocab_size, use_cache=False).logits[:, :-1].float()
    return bool((logits[0] - logits[1]).abs().max() > 0.01 * logits.std())
