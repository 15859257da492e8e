"""Tiny models of the types that the tests train."""

from helpers import BLOCK_SIZE

NARROW = "num_hidden_layers=2,hidden_size=32,intermediate_size=88,num_attention_heads=4,num_key_value_heads=2"
WIDE = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4"
DENSE = f"{WIDE},intermediate_size=176,num_key_value_heads=4"
# A tied and an untied output matrix, grouped queries, QK-norm and heads wider than the hidden size, a sliding window
# shorter than the rows, a bias of the output matrix, and fused projections.
SHAPES = {
    "gpt2": "n_layer=2,n_head=2,n_embd=32",
    "llama": NARROW,
    "qwen3": f"{NARROW},head_dim=16,tie_word_embeddings=true",
    "gpt_neox": f"{WIDE},intermediate_size=256",
    "gemma3_text": f"{DENSE},sliding_window=16,head_dim=16",
    "phi": DENSE,
    "phi3": DENSE,
}


def options_of(model_type: str, *changes: str) -> list[str]:
    """Return the options of a tiny model. changes: `config_overrides` that differ."""
    overrides = ",".join((SHAPES[model_type], *changes))
    return ["--model_type", model_type, "--config_overrides", overrides, "--block_size", str(BLOCK_SIZE)]
