"""A GPT-2 of two blocks with random weights, for tests of saved models."""

from pathlib import Path

import torch
from helpers import BLOCK_SIZE
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


def save_small_model(directory: Path, tokenizer_dir: Path, **shape: object) -> Path:
    """Save the model with its tokenizer. Its weights are wide, so that each token depends on the whole context.

    shape: values of `GPT2Config` that differ.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    eos = tokenizer.eos_token_id
    size = {"n_positions": BLOCK_SIZE, "n_layer": 2, "n_head": 2, "n_embd": 32, "initializer_range": 0.5}
    values = {"vocab_size": len(tokenizer), "bos_token_id": eos, "eos_token_id": eos, **size, **shape}
    GPT2LMHeadModel(GPT2Config(**values)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
