"""Publishing the final model on the Hub: never fatal, always with the command to try again."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token

from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset

# What is published. Checkpoints stay at home, and so do the files that name local paths.
PUBLISHED = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "metrics.jsonl",
]


def check_login() -> str | None:
    """A warning to give before training if the upload at its end cannot succeed, else None."""
    if get_token() is None:
        return "warning: the upload at the end will fail unless you log in before (`hf auth login`)"
    return None


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


def push_to_hub(output_dir: Path, config: TrainConfig) -> str:
    """Upload the final model folder. Returns the line to print; a failure is in it, with the way to repeat."""
    try:
        api = HfApi()
        url = api.create_repo(config.hub_model_id, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(
            repo_id=config.hub_model_id,
            folder_path=output_dir,
            allow_patterns=PUBLISHED,
            commit_message="Upload model",
        )
        return f"published at {url}"
    except Exception as error:  # network, authentication, quota, ...: the trained model is worth more than any of it
        files = " ".join(f"\\\n        --include {name}" for name in PUBLISHED)
        return (
            f"upload to the Hub failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}\n"
            f"the model is safe in {output_dir}; repeat with\n"
            f"    hf upload {config.hub_model_id} {shlex.quote(str(output_dir))} . {files}"
            + (" --private" if config.hub_private_repo else "")
        )
