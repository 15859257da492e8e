"""Write the model card."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset


def write_model_card(output_dir: Path, config: TrainConfig, dataset: PackedDataset, summary: dict) -> None:
    """Write the model folder's README.md: what the model is, its training data, its scores, and how to use it."""
    name, source, origin = config.hub_model_id or output_dir.name, config.model_name_or_path, "trained from scratch"
    if source is not None:
        origin = f"fine-tuned from {_public_name(source)}"
    card_data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "gpt2-recipe"], model_name=name
    )
    text = f"""---
{card_data.to_yaml()}
---

# {name}

A GPT-2 language model with {summary["num_parameters"]:,} parameters, {origin} with gpt2-recipe.

| | |
|---|---|
| training tokens | {summary["tokens_seen"]:,} |
| steps | {summary["step"]:,} of {config.global_batch_size} x {config.block_size} tokens |
| validation loss | {summary["eval_loss"]:.4f} nats per token |
| perplexity | {summary["perplexity"]:.3f} |
| bits per byte | {summary["bits_per_byte"]:.4f} |
| context length | {config.block_size} tokens |
| vocabulary | {dataset.vocab_size:,} tokens |
| source | {describe_source(dataset.metadata["source"])} |

```python
from transformers import pipeline

generate = pipeline("text-generation", model="{config.hub_model_id or output_dir}")
print(generate("The ", max_new_tokens=50)[0]["generated_text"])
```
"""
    ModelCard(text).save(output_dir / "README.md")


def describe_source(source: dict) -> str:
    """Return the dataset's name, or the names of its folder or files without their private paths."""
    if name := source.get("dataset_name"):
        return ", ".join(filter(None, [_public_name(name), source.get("dataset_config_name")]))
    return ", ".join(Path(path).name for path in source.get("train_files") or ["unknown"])


def _public_name(name: str) -> str:
    """Return a Hub id as it is, and a folder's name without its path, even if it is on another machine."""
    path = Path(name)
    is_local = path.exists() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    return path.absolute().name if is_local else name
