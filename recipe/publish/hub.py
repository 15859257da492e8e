"""Publish the final model on the Hub. A failure never ends a run; it prints the command that repeats the upload."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi, get_token

from recipe.config import TrainConfig
from recipe.errors import short_reason

# Checkpoints and the files that contain local paths are not published.
PUBLISHED = [
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "metrics.jsonl"),
]


def check_login() -> str | None:
    """Return a warning to print before training if the final upload cannot succeed, else None."""
    warning = "warning: the upload after training will fail unless you log in first (`hf auth login`)"
    return warning if get_token() is None else None


def push_to_hub(output_dir: Path, config: TrainConfig) -> str:
    """Upload the final model. Returns a message with the model's address, or with the failure and how to repeat."""
    api, repo_id = HfApi(), config.hub_model_id
    try:
        url = api.create_repo(repo_id, private=config.hub_private_repo, exist_ok=True)
        options = {"allow_patterns": PUBLISHED, "commit_message": "Upload model"}
        api.upload_folder(repo_id=repo_id, folder_path=output_dir, **options)
        return f"published at {url}"
    except Exception as error:  # network, authentication, quota, ...: none of them is worth losing the trained model
        options = [f"--include {name}" for name in PUBLISHED] + ["--private"] * config.hub_private_repo
        command = " \\\n        ".join([f"hf upload {repo_id} {shlex.quote(str(output_dir))} .", *options])
        reason = f"upload to the Hub failed: {short_reason(error)}"
        return f"{reason}\nthe model is safe in {output_dir}; repeat the upload with\n    {command}"
