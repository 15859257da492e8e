"""Export the final model into the run's folder."""

import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from recipe.checkpoint import list_checkpoints
from recipe.disk import flush
from recipe.errors import UserError, short_reason
from recipe.metrics import SUMMARY_NAME
from recipe.model.files import write_files
from recipe.model.weights import write_model
from recipe.publish.card import CARD_NAME, CURVE_NAME


def export_model(
    model: PreTrainedModel,
    model_config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    files: dict[str, bytes],
    output_dir: Path,
) -> None:
    """Write the final model; each file appears only when it is complete. Raises `UserError` if that fails.

    model, model_config, weights: as for `write_model`. files: the others, by name.
    """
    partial = output_dir / ".checkpoint-final.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_model(model, model_config, weights, partial)
        write_files(files, partial)
        for name in (SUMMARY_NAME, CARD_NAME, CURVE_NAME):  # of an earlier model; a kill may come at any time
            (output_dir / name).unlink(missing_ok=True)
        for path in partial.iterdir():
            flush(path)
            os.replace(path, output_dir / path.name)
        partial.rmdir()
    except Exception as error:  # a full disk: safetensors, tokenizers and the file system each raise their own
        shutil.rmtree(partial, ignore_errors=True)
        problem = f"the final model could not be written to {output_dir}: {short_reason(error)}"
        checkpoints = list_checkpoints(output_dir)
        how = f"continues from {checkpoints[-1].name}" if checkpoints else "starts at step 0: there is no checkpoint"
        remedy = f"fix that; then the same command with --resume_from_checkpoint auto {how}"
        raise UserError(f"{problem}; {remedy}") from error
