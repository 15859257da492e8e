"""Count parameters and FLOPs."""

import copy
import math

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from recipe.config import TrainConfig
from recipe.errors import plural
from recipe.model.weights import is_vocabulary

_SIZES: dict[str, tuple[int, int, int]] = {}  # building a model takes 0.1 s, even on the meta device


def _count_sizes(model_config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the parameters of a model, of embeddings that are only looked up, and of an average block's matrices.

    The model is not built; tied embeddings count once.
    """
    key = str(vars(model_config))
    if key not in _SIZES:
        with torch.device("meta"):
            shape = copy.deepcopy(model_config)
            shape.pad_token_id = None  # it may not fit a vocabulary that is not known yet
            model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
            model(torch.zeros(1, 2, dtype=torch.int64))  # raises for heads that do not fit together
        head = model.get_output_embeddings().weight
        embeddings = {layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding)}
        matrices = sum(p.numel() for p in {*model.parameters()} - {head, *embeddings} if p.dim() > 1)
        lookups = sum(p.numel() for p in embeddings - {head})
        _SIZES[key] = model.num_parameters(), lookups, matrices // model_config.num_hidden_layers
    return _SIZES[key]


def count_flops_per_token(model_config: PreTrainedConfig, num_parameters: int, block_size: int) -> int:
    """Return the FLOPs per trained token, forward and backward: 6 (N - wpe) + 12 L d T (PaLM, appendix B; nanoGPT).

    num_parameters: N, with the padding. block_size: T, tokens per row. d: of all heads together. Untied input
    embeddings are only looked up, like wpe, and do not count; tied ones are the output matrix.
    """
    attention = 12 * model_config.num_hidden_layers * math.prod(count_heads(model_config)) * block_size
    return 6 * (num_parameters - _count_sizes(model_config)[1]) + attention


def count_heads(model_config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of heads of a block's queries, and the width of each."""
    num_heads = model_config.num_attention_heads
    return num_heads, getattr(model_config, "head_dim", None) or model_config.hidden_size // num_heads


def find_odd_size(model_config: PreTrainedConfig) -> str | None:
    """Warn that the heads' width is not a multiple of 8, and name the next multiple; None if it is one.

    Flash kernels are made for multiples of 8 values, and matrix units for multiples of 16 bytes (NVIDIA's guide).
    """
    num_heads, head_dim = count_heads(model_config)
    if head_dim % 8 == 0:
        return None
    better = head_dim - head_dim % -8
    problem = f"{plural(num_heads, 'head')} of {head_dim} values: GPUs are made for multiples of 8"
    return f"{problem}; {better}, a width of {num_heads * better}, is faster"


def count_training_flops(config: TrainConfig, model_config: PreTrainedConfig, num_parameters: int) -> float:
    """Return the FLOPs of the whole run; infinite if only its time is limited."""
    num_tokens = (config.max_steps or math.inf) * config.tokens_per_step
    return num_tokens * count_flops_per_token(model_config, num_parameters, config.block_size)


def count_parameters(model_config: PreTrainedConfig) -> int:
    """Count the parameters of a model that is not built; tied embeddings count once."""
    return _count_sizes(model_config)[0]


def count_block_matrices(model_config: PreTrainedConfig) -> int:
    """Count the parameters of a block's matrices: four in GPT-2."""
    return _count_sizes(model_config)[2]


def count_inner(model_config: PreTrainedConfig) -> int:
    """Return the width of the MLP, if two matrices hold all of a block's parameters outside GPT-2's attention."""
    width = model_config.hidden_size
    return (count_block_matrices(model_config) - 4 * width * width) // (2 * width)


def count_head(model_config: PreTrainedConfig) -> int:
    """Count the parameters of the matrix that computes the logits."""
    return model_config.vocab_size * model_config.hidden_size


def describe_output_share(model_config: PreTrainedConfig, flops_per_token: int) -> str | None:
    """Say that the output layer has most of the matrix products; None if it does not.

    In ten minutes with 5 MB of text, 8,192 tokens were then better than 50,257, and 2,048 worse (LOG.md).
    model_config: with the padded vocabulary.
    """
    share = 6 * count_head(model_config) / flops_per_token
    if share <= 0.5:
        return None
    return f"{share:.0%} of the matrix products are in the output layer; with 8,192 tokens, a run reads more text"


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Return the number of parameters of the saved model, without the padding; tied parameters count once."""
    rows = {p: vocab_size if is_vocabulary(model, p) else len(p) for p in model.parameters()}
    return sum(p.numel() // len(p) * num_rows for p, num_rows in rows.items())


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round up to a multiple: 50257 -> 50304 for 128."""
    return -(-vocab_size // multiple) * multiple
