"""Count parameters and FLOPs."""

from transformers import PreTrainedConfig, PreTrainedModel

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


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Return the number of parameters of the saved model, without the padding; tied parameters count once."""
    return sum(p[:vocab_size].numel() if is_vocabulary(model, p) else p.numel() for p in model.parameters())


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round up to a multiple: 50257 -> 50304 for 128."""
    return -(-vocab_size // multiple) * multiple
