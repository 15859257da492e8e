"""Count parameters and FLOPs."""

from transformers import PreTrainedConfig, PreTrainedModel

from recipe.config import TrainConfig
from recipe.model.weights import is_vocabulary


def count_flops_per_token(model_config: PreTrainedConfig, num_parameters: int, block_size: int) -> int:
    """Return the FLOPs per trained token, forward and backward: 6 (N - wpe) + 12 L d T (PaLM, appendix B; nanoGPT).

    num_parameters: N, with the padding. block_size: T, tokens per row. Tied embeddings count because they are the
    output matrix; untied input embeddings are only looked up and do not.
    """
    lookups = model_config.max_position_embeddings * model_config.hidden_size
    if not model_config.tie_word_embeddings:
        lookups += model_config.vocab_size * model_config.hidden_size
    attention = 12 * model_config.num_hidden_layers * model_config.hidden_size * block_size
    return 6 * (num_parameters - lookups) + attention


def count_training_flops(config: TrainConfig, model_config: PreTrainedConfig, num_parameters: int) -> int:
    """Return the FLOPs of the whole run; 0 if it only evaluates."""
    num_tokens = 0 if config.eval_only else config.max_steps * config.global_batch_size * config.block_size
    return num_tokens * count_flops_per_token(model_config, num_parameters, config.block_size)


def count_parameters(model_config: PreTrainedConfig) -> int:
    """Count the parameters of a GPT-2 model that is not built; tied embeddings count once."""
    width = model_config.hidden_size
    embeddings = count_head(model_config) * (1 if model_config.tie_word_embeddings else 2)
    embeddings += model_config.max_position_embeddings * width
    vectors = 9 * width + (model_config.n_inner or 4 * width)  # a block's biases (5 and n_inner) and two LayerNorms
    return embeddings + model_config.num_hidden_layers * (count_block_matrices(model_config) + vectors) + 2 * width


def count_block_matrices(model_config: PreTrainedConfig) -> int:
    """Count the parameters of a block's four matrices."""
    width = model_config.hidden_size
    return 4 * width * width + 2 * width * (model_config.n_inner or 4 * width)


def count_head(model_config: PreTrainedConfig) -> int:
    """Count the parameters of the matrix that computes the logits."""
    return model_config.vocab_size * model_config.hidden_size


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Return the number of parameters of the saved model, without the padding; tied parameters count once."""
    return sum(p[:vocab_size].numel() if is_vocabulary(model, p) else p.numel() for p in model.parameters())


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round up to a multiple: 50257 -> 50304 for 128."""
    return -(-vocab_size // multiple) * multiple
