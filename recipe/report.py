"""What a run leaves in its folder and on the screen: metrics.jsonl, summary.json, progress bar, closing words."""

import itertools
import json
import os
import shlex
import shutil
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from recipe.checkpoint import list_checkpoints
from recipe.config import STANDARD_LIBRARY, TrainConfig, UserError, save_config
from recipe.progress import progress_target

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"
CONFIG_NAME = "training_config.yaml"


def choose_output_dir(config: TrainConfig, recipe: str) -> Path:
    """Name the run's folder; nothing is changed. Raises `UserError` if it holds another run or cannot be written.

    Without `output_dir` it is the first free one of runs/NAME, runs/NAME-2, ...
    """
    resumed = config.resume_from_checkpoint
    if config.output_dir is None and resumed:  # a path: the run it belongs to
        directory = Path(resumed) if list_checkpoints(Path(resumed)) else Path(resumed).absolute().parent
    elif config.output_dir is None:
        text = config.train_file or [config.dataset_name if config.dataset_name != STANDARD_LIBRARY else None]
        name = config.run_name or (Path(text[0]).stem if text[0] else recipe)
        numbered = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        directory = next(path for path in numbered if not files_of_a_run(path))
    else:
        directory = Path(config.output_dir)
        leftovers = files_of_a_run(directory)
        there = directory.absolute()
        goes_on = resumed == "latest" or (
            resumed and there in (Path(resumed).absolute(), Path(resumed).absolute().parent)
        )
        if leftovers and not (goes_on or config.overwrite):
            raise UserError(
                f"{directory} holds another run ({', '.join(p.name for p in leftovers[:3])}); "
                + ("go on with it (--resume_from_checkpoint latest), " if list_checkpoints(directory) else "")
                + "replace it (--overwrite), or name another --output_dir"
            )
        strangers = [name for name in ("README.md", "config.json", "dataset_dict.json") if (directory / name).exists()]
        if strangers and not leftovers:
            raise UserError(f"{directory} holds files that a run would replace ({', '.join(strangers)}); name another")
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to output_dir {directory}: {existing} is not a writable folder")
    return directory


def files_of_a_run(directory: Path) -> list[Path]:
    """What shows that a folder holds a run, and what `--overwrite` removes from it."""
    names = ("model.safetensors", METRICS_NAME, SUMMARY_NAME, CONFIG_NAME)
    return [*list_checkpoints(directory), *(directory / name for name in names if (directory / name).exists())]


def open_output_dir(directory: Path, config: TrainConfig) -> None:
    """Create the run's folder; with `overwrite` remove another run's checkpoints and results, and nothing else."""
    for path in files_of_a_run(directory) if config.overwrite else []:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    save_config(config, directory / CONFIG_NAME)


class RunReport:
    """Writes and shows the events of a run; on every process but the first it does nothing."""

    def __init__(self, accelerator: Accelerator, config: TrainConfig, output_dir: Path, first_step: int) -> None:
        self.accelerator, self.output_dir = accelerator, output_dir
        self.enabled = accelerator.is_main_process
        scalars = {k: v for k, v in asdict(config).items() if isinstance(v, (int, float, str, bool))}
        accelerator.init_trackers(config.run_name or output_dir.name, config=scalars)
        if self.enabled and first_step and (output_dir / METRICS_NAME).exists():
            drop_events_after(output_dir / METRICS_NAME, first_step)
        self.bar = tqdm(
            total=config.max_steps,
            initial=first_step,
            unit="step",
            desc="train",
            dynamic_ncols=True,
            disable=not self.enabled,
            smoothing=0.1,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            **progress_target(),
        )

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl and hand the numbers to the trackers."""
        if self.enabled:
            with open(self.output_dir / METRICS_NAME, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        numbers = {f"{event}/{key}": value for key, value in values.items() if value is not None}
        self.accelerator.log(numbers, step=step)

    def train(self, step: int, **values: Any) -> None:
        self.event("train", step, **values)
        shown = f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(shown, refresh=False)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self.event("eval", step, **values)
        self.say(
            f"step {step:>6,}: validation loss {values['loss']:.4f}, perplexity {values['perplexity']:,.2f}, "
            f"{values['bits_per_byte']:.4f} bits per byte"
        )

    def table(self, rows: dict[str, str]) -> None:
        """Print labelled paragraphs, as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, 120)
        for label, text in rows.items():
            self.say(
                textwrap.fill(
                    text,
                    width,
                    initial_indent=f"{label:11}",
                    subsequent_indent=" " * 11,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    def advance(self, steps: float) -> None:
        """Move the bar by a part of a step: a step of many micro-batches may take minutes."""
        self.bar.update(steps)

    def say(self, text: str) -> None:
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()

    def summary(self, values: dict[str, Any]) -> None:
        (self.output_dir / SUMMARY_NAME).write_text(json.dumps(values, indent=2) + "\n")


def drop_events_after(path: Path, step: int) -> None:
    """Take back what a run has logged beyond the checkpoint it is resumed from: it will log it again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    written = path.with_suffix(".new")
    written.write_text("".join(kept), encoding="utf-8")
    written.replace(path)


def closing_words(config: TrainConfig, output_dir: Path, untrained: dict, trained: dict, sample: str) -> str:
    """The last screen: what was reached, a sample, where the model is, and the commands to go on with."""
    folder, prompt = shlex.quote(str(output_dir)), shlex.quote(config.sample_prompt)
    lines = ["", f"{'':14}{'untrained':>12}{'trained':>12}"]
    for key in ("loss", "perplexity", "bits_per_byte"):
        lines.append(f"{key.replace('_', ' '):14}{untrained[key]:>12,.3f}{trained[key]:>12,.3f}")
    lines += [
        "",
        f"A sample, from the prompt {config.sample_prompt!r}:",
        *("    " + line for line in sample.splitlines()),
        "",
        f"The model is in {output_dir}, in Hugging Face format. Next:",
        "",
        f"  generate   python scripts/generate_text.py --model {folder} --prompt {prompt}",
    ]
    if config.save_steps:
        lines += [
            "  resume     accelerate launch recipe/train.py --resume_from_checkpoint latest \\",
            f"               --config {folder}/{CONFIG_NAME} --output_dir {folder}",
        ]
    if config.dataset_name == STANDARD_LIBRARY:
        lines += [
            "  your text  accelerate launch recipe/train.py --train_file TEXT.txt",
            "  GPT-2 124M python scripts/prepare_data.py --dataset_name HUB_ID \\",
            "               --tokenizer_name openai-community/gpt2 --output_dir DIR",
            "             accelerate launch \\",
            "               --config_file accelerate_configs/single_gpu.yaml \\",
            "               recipe/train.py --config gpt2_124m --dataset_dir DIR",
        ]
    return "\n".join(lines)
