"""Is this loss normal? Known runs to compare with, and for any other text the loss of a unigram model.

Each file in references/ describes finished runs that share data, tokenizer, model and batch:

    name, source, note    what the sentence calls them, where the numbers are from, and what else to know
    applies_to            {property: allowed values}: a run that differs in any of them is not compared
    optim                 adamw or muon: of several references, a run is compared with the one that has its optimizer
    schedules             [{option: value}]: schedules under which runs of one length pass similar losses on the way
    runs                  [[[tokens seen, validation loss], ...], ...]: by tokens; the last point of each is its end
    band                  nats above and below that are normal

scripts/benchmarks/reference_curve.py writes `runs` from the folders of finished runs.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.data.packed import PackedDataset, PackedSplit
from recipe.optim.schedule import count_warmup_steps

REFERENCES = Path(__file__).parent / "references"
CLOSE = 1.05  # 5% more tokens lower the final loss by 0.005 at 124M and by 0.03 in the demo: much less than the bands
EARLY = 0.1  # of a run: losses before it depend mostly on the warm-up
MAX_TRAIN_TOKENS, MAX_VALIDATION_TOKENS = 10_000_000, 2_000_000  # counted for the unigram model, in less than a second
STRETCHES = 50  # of consecutive rows that sample a split: as many single rows would be thousands of reads from a disk

CAUSES = {
    "as expected": "",
    "better": "; if no change to the recipe explains it, look for validation text in the training text",
    "worse": "; usual causes: a learning rate, warm-up or schedule that does not fit, too few distinct documents, "
    "another kind of validation text, data in sorted order, low precision, or a mistake in changed code",
}
UNLEARNED = (
    ": this run has learned no more than token frequencies; usual causes: a learning rate that is much too high or "
    "too low, too few steps, inputs and targets that do not belong together, or a damaged dataset"
)


class Yardstick:
    """Compares a run's validation losses with those of known runs, and with a unigram model's."""

    def __init__(self, config: TrainConfig, dataset: PackedDataset, model_config: PreTrainedConfig) -> None:
        self.max_steps, self.warmup_steps = config.max_steps, count_warmup_steps(config)
        self.tokens_per_step = config.global_batch_size * config.block_size
        self.config, self.references = config, find_references(config, dataset.metadata, model_config)
        self.unigram_loss = compute_unigram_loss(dataset)
        self.reported: set[str] = set()  # each kind once

    def check(self, step: int, loss: float) -> dict[str, str]:
        """Return {kind: warning} of what an evaluation before the end reveals for the first time."""
        if not max(self.warmup_steps, EARLY * self.max_steps) <= step < self.max_steps:
            return {}
        judgement = self.judge(step, loss)
        if judgement:
            is_normal, kind = judgement["verdict"] == "as expected", f"{judgement['verdict']}_than_expected"
        else:
            is_normal, kind = loss <= self.unigram_loss, "unigram"
        if is_normal or kind in self.reported:
            return {}
        self.reported.add(kind)
        return {kind: self.describe(step, loss)}

    def judge(self, step: int, loss: float) -> dict[str, Any] | None:
        """Return {"name", "expected_loss", "band", "verdict"}, or None if no reference has a loss for this step.

        The end of a run is compared with the ends of the reference's runs. A loss on the way belongs to a length and a
        schedule, because it depends on the learning rate of the moment: only a run that shares both is compared.
        """
        tokens, last = step * self.tokens_per_step, self.max_steps * self.tokens_per_step
        for reference in self.references:
            points = sorted(run[-1] for run in reference["runs"])
            if step < self.max_steps:
                equal = [run for run in reference["runs"] if interpolate(run[-1:], last) is not None]
                points = equal[0] if equal and has_schedule(self.config, reference["schedules"]) else []
            expected = interpolate(points, tokens)
            if expected is not None:
                verdict = "better" if loss < expected else "worse"  # which NaN is, too
                if abs(loss - expected) <= reference["band"]:
                    verdict = "as expected"
                kept = {key: reference[key] for key in ("name", "band")}
                return {**kept, "expected_loss": expected, "verdict": verdict}
        return None

    def describe(self, step: int, loss: float) -> str:
        """Return the sentence that ends a run, without a capital letter and a period."""
        judgement = self.judge(step, loss)
        return describe_judgement(loss, judgement) if judgement else self._compare_with_unigram(loss)

    def _compare_with_unigram(self, loss: float) -> str:
        knows = "a model that knows only how often each token occurs reaches"
        known = f"validation loss is {loss:.2f}; {knows} {self.unigram_loss:.2f}"
        return known if loss <= self.unigram_loss else known + UNLEARNED


def find_references(config: TrainConfig, metadata: dict[str, Any], model_config: PreTrainedConfig) -> list[dict]:
    """Return the references that apply to a run, those with its kind of optimizer first. metadata: of the dataset.

    None applies to a run that starts from given weights, which have seen other text.
    """
    if config.model_name_or_path:
        return []
    source = metadata["source"]
    run = {
        **{key: source.get(key) for key in ("dataset_name", "dataset_config_name", "validation_split_percentage")},
        **{key: metadata[key] for key in ("content_sha256", "vocab_size", "eos_token_id", "block_size")},
        "model_type": model_config.model_type,
        "n_layer": model_config.num_hidden_layers,
        "n_head": model_config.num_attention_heads,
        "n_embd": model_config.hidden_size,
        "tokens_per_step": config.global_batch_size * config.block_size,
    }
    references = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(REFERENCES.glob("*.json"))]
    fitting = [r for r in references if all(run[key] in allowed for key, allowed in r["applies_to"].items())]
    return sorted(fitting, key=lambda r: (r["optim"] == "muon") != (config.optim == "muon"))


def has_schedule(config: TrainConfig, schedules: list[dict[str, Any]]) -> bool:
    """Return whether the run has all options of one of the schedules."""
    return any(all(getattr(config, key) == value for key, value in options.items()) for options in schedules)


def interpolate(points: list[list[float]], tokens: float) -> float | None:
    """Return the loss at a number of tokens, linear in their logarithm, or None before the first or after the last.

    points: [[tokens, loss], ...] by tokens.
    """
    if not points or not points[0][0] / CLOSE < tokens < points[-1][0] * CLOSE:
        return None
    at, losses = zip(*points, strict=True)
    return float(np.interp(math.log(tokens), np.log(at), losses))


def describe_judgement(loss: float, judgement: dict[str, Any]) -> str:
    """Return a sentence without a capital letter and a period. judgement: from `Yardstick.judge`."""
    name, verdict = judgement["name"], judgement["verdict"]
    text = f"validation loss of {loss:.2f} is {verdict}{'' if verdict == 'as expected' else ' than expected'}: {name} "
    text += f"reached {judgement['expected_loss']:.2f} after as many tokens, and a difference of up to "
    return f"{text}{judgement['band']:g} is normal{CAUSES[verdict]}"


def compute_unigram_loss(dataset: PackedDataset) -> float:
    """Return the loss in nats per token, on validation targets, of a model that knows only the tokens' frequencies.

    These are counted in the training targets, plus one each. Large splits are sampled; of a streamed text, only the
    prepared head is known.
    """
    counts = count_targets(dataset.splits["train"], MAX_TRAIN_TOKENS) + 1
    targets = count_targets(dataset.splits["validation"], MAX_VALIDATION_TOKENS)
    return float(targets @ (math.log(counts.sum()) - np.log(counts)) / targets.sum())


def count_targets(split: PackedSplit, max_tokens: int) -> np.ndarray:
    """Count each token among the targets of all rows, or of evenly spread stretches: int64 [vocab_size]."""
    num_rows = min(len(split), max(1, max_tokens // split.block_size))
    length, counts = -(-num_rows // STRETCHES), np.zeros(split.vocab_size, np.int64)
    for start in range(0, num_rows, length):
        first = start * len(split) // num_rows
        rows = split[np.arange(first, min(first + length, len(split)))]
        counts += np.bincount(rows[:, 1:].reshape(-1), minlength=split.vocab_size)
    return counts
