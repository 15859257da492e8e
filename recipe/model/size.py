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


def count_parameters(model_config: PreTrainedConfig) -> int:
    """Count the parameters of GPT-2 from its config: embeddings, blocks, final LayerNorm; a tied head counts once."""
    width, inner = model_config.hidden_size, model_config.n_inner or 4 * model_config.hidden_size
    attention = width * 3 * width + 3 * width + width * width + width
    mlp = width * inner + inner + inner * width + width
    blocks = model_config.num_hidden_layers * (attention + mlp + 4 * width)  # two LayerNorms
    vocabularies = 1 if model_config.tie_word_embeddings else 2
    return width * (vocabularies * model_config.vocab_size + model_config.max_position_embeddings + 2) + blocks


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Return the number of parameters of the saved model, without the padding; tied parameters count once."""
    return sum(p[:vocab_size].numel() if is_vocabulary(model, p) else p.numel() for p in model.parameters())


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round up to a multiple: 50257 -> 50304 for 128."""
    return -(-vocab_size // multiple) * multiple
