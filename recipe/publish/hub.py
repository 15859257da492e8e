"""Publishing the final model on the Hub: never fatal, always with the command to try again."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi, get_token

from recipe.config import TrainConfig

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
