"""Parameters and FLOPs."""

from transformers import PreTrainedConfig, PreTrainedModel

from recipe.model.weights import _is_vocabulary


def count_flops_per_token(model_config: PreTrainedConfig, num_parameters: int, block_size: int) -> int:
    """Training FLOPs per token, forward and backward: 6 (N - wpe) + 12 L d T (PaLM, appendix B; nanoGPT).

    num_parameters: of the model as trained. block_size: T, the tokens in a row. 124M at T = 1024: 6 * 123.7 M +
    12 * 12 * 768 * 1024 = 855 M. Untied input embeddings are looked up, not multiplied, so they do not count; tied
    ones are the output's matrix.
    """
    lookups = model_config.n_positions * model_config.n_embd
    if not model_config.tie_word_embeddings:
        lookups += model_config.vocab_size * model_config.n_embd
    attention = 12 * model_config.n_layer * model_config.n_embd * block_size
    return 6 * (num_parameters - lookups) + attention


def count_parameters(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """50257 -> 50304 for a multiple of 128."""
    return -(-vocab_size // multiple) * multiple


def count_exported_parameters(model: PreTrainedModel, vocab_size: int) -> int:
    """Parameters of the model as it is saved, tied ones once."""
    return sum(p[:vocab_size].numel() if _is_vocabulary(model, p) else p.numel() for p in model.parameters())
