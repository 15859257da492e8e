# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.16",
#     "transformers>=5.17,<6",
#     "accelerate>=1.15,<2",
#     "datasets>=5.0,<6",
#     "evaluate>=0.4.6,<0.5",
#     "tokenizers>=0.23.1,<0.24",
#     "gigatoken>=0.10,<0.11",
#     "huggingface_hub>=1.31,<3",
# ]
#
# [tool.hf-jobs]  # what `hf jobs uv run` uses where the command line says nothing
# secrets = ["HF_TOKEN"]
# timeout = "12h"
# ///
"""Train in a Hugging Face Job; submitting the same command again resumes the run from its checkpoint on the Hub.

pip wheel . --no-deps --wheel-dir build/wheels
hf jobs uv run --flavor a100-large --timeout 12h --secrets HF_TOKEN \
    -v ./build/wheels:/wheels --with /wheels/gpt2_recipe-0.1.0-py3-none-any.whl -v ./runs/data/fineweb:/dataset \
    scripts/train_on_hub.py --config gpt2_124m --dataset_dir /dataset --hub_model_id user/name

The options after the script go to recipe/train.py. A job stops at its time limit, 30 minutes if none is set,
and its disk is deleted. Whether a signal precedes that is not documented, so --save_steps limits what a stop costs.
Without --hub_model_id nothing is uploaded: `uv run --with . scripts/train_on_hub.py` trains on this machine.
"""

import os
import sys
from pathlib import Path

try:
    import recipe
except ModuleNotFoundError:
    sys.exit("error: gpt2-recipe is not installed; pass its folder, its wheel or its git address to uv: --with .")
from recipe.command_line import load_config
from recipe.config import TrainConfig
from recipe.errors import run_main


def main() -> None:
    arguments = sys.argv[1:]
    defaults = build_defaults(arguments)
    import torch  # takes seconds; mistyped options have been reported

    command = [*build_launcher(torch.cuda.device_count()), *defaults, *arguments]
    # The training program takes this process's place: it gets the job's signals and sets the exit status.
    os.execv(sys.executable, [sys.executable, *command])


def build_defaults(arguments: list[str]) -> list[str]:
    """Return the options of a run that resumes from where it left its checkpoints. Options after them have priority.

    arguments: options of recipe/train.py. Raises `UserError` if they are wrong.
    """
    config, name = load_config(arguments)
    defaults = []
    if config.hub_model_id is not None:
        defaults += ["--push_to_hub", "true"]
        if config.hub_strategy == TrainConfig.hub_strategy:
            defaults += ["--hub_strategy", "checkpoint"]
        name = config.hub_model_id.split("/")[-1]
    if config.output_dir is None:
        defaults += ["--output_dir", f"runs/{config.run_name or name}"]
    if config.resume_from_checkpoint is None:
        defaults += ["--resume_from_checkpoint", "auto"]
    return defaults


def build_launcher(num_gpus: int) -> list[str]:
    """Return Python's arguments that run recipe/train.py on all GPUs of this machine, or on its CPU.

    One process needs no launcher, and `accelerate launch` would end before that process has saved (accelerate 1.15).
    The recipe chooses precision and compilation where the launcher says "no".
    """
    program = str(Path(recipe.__file__).parent / "train.py")
    if num_gpus < 2:
        return [program]
    options = ["--num_processes", str(num_gpus), "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    return ["-m", "accelerate.commands.launch", "--multi_gpu", *options, program]


if __name__ == "__main__":
    run_main(main)
