"""A GPT-2 pre-training recipe: Transformers model, Accelerate loop, packed dataset."""

__version__ = "0.1.0"
