"""The model card."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset


def write_model_card(output_dir: Path, config: TrainConfig, dataset: PackedDataset, summary: dict) -> None:
    """README.md of the model folder: what it is, on what it was trained, how good it is, how to use it."""
    name = config.hub_model_id or output_dir.name
    card_data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "gpt2-recipe"], model_name=name
    )
    where = config.hub_model_id or output_dir
    text = f"""---
{card_data.to_yaml()}
---

# {name}

A GPT-2 language model of {summary["num_parameters"]:,} parameters, {_describe_origin(config)} with gpt2-recipe.

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

print(pipeline("text-generation", model="{where}")("The ", max_new_tokens=50)[0]["generated_text"])
```
"""
    ModelCard(text).save(output_dir / "README.md")


def _describe_origin(config: TrainConfig) -> str:
    """From scratch, or from which model: its Hub id, or its folder's name without the path."""
    source = config.model_name_or_path
    if source is None:
        return "trained from scratch"
    return f"fine-tuned from {Path(source).absolute().name if Path(source).exists() else source}"


def describe_source(source: dict) -> str:
    """The dataset's name, or the names of the files without their folders, which are nobody's business."""
    if source.get("dataset_name"):
        config_name = source.get("dataset_config_name")
        return source["dataset_name"] + (f", {config_name}" if config_name else "")
    return ", ".join(Path(path).name for path in source.get("train_files") or source.get("shards") or ["unknown"])
