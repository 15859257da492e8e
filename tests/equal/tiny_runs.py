"""Tiny models of several types, and what the tests of equality read of a run."""

from pathlib import Path

import pytest
from helpers import BLOCK_SIZE, values_of

NARROW = "num_hidden_layers=2,hidden_size=32,intermediate_size=88,num_attention_heads=4,num_key_value_heads=2"
WIDE = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4"
DENSE = f"{WIDE},intermediate_size=176,num_key_value_heads=4"
# A tied and an untied output matrix, grouped queries, QK-norm and heads wider than the hidden size, a sliding window
# shorter than the rows, a bias of the output matrix, fused projections, and RMSNorm without weights.
SHAPES = {
    "gpt2": "n_layer=2,n_head=2,n_embd=32",
    "llama": NARROW,
    "qwen3": f"{NARROW},head_dim=16,tie_word_embeddings=true",
    "gpt_neox": f"{WIDE},intermediate_size=256",
    "gemma3_text": f"{DENSE},sliding_window=16,head_dim=16",
    "phi": DENSE,
    "phi3": DENSE,
    "nanochat": f"{DENSE},tie_word_embeddings=true,final_logit_softcapping=null",
}
STABLE = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", "num_decay_steps=0.2"]


def options_of(model_type: str, *changes: str) -> list[str]:
    """Return the options of a tiny model. changes: `config_overrides` that differ."""
    overrides = ",".join((SHAPES[model_type], *changes))
    return ["--model_type", model_type, "--config_overrides", overrides, "--block_size", str(BLOCK_SIZE)]


def start_from(run: Path, step: int) -> list[str]:
    """Return the options of a branch."""
    return ["--resume_from_checkpoint", str(run / f"checkpoint-{step}")]


def assert_equal_losses(run: Path, reference: Path, after: int = -1, tolerance: float = 1e-5) -> None:
    """Compare the training and validation losses after a step."""
    for event in ("train", "eval"):
        expected = values_of(reference, "loss", event, after)
        assert expected, event
        assert values_of(run, "loss", event, after) == pytest.approx(expected, abs=tolerance), event
