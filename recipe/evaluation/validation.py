"""Validation loss, perplexity and bits per byte over some or all validation rows, and a sample of text."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn

from recipe.config import TrainConfig
from recipe.data.batches import iterate_validation, to_device
from recipe.data.packed import bytes_per_token
from recipe.data.tokenizer import text_ids
from recipe.errors import short_reason
from recipe.evaluation.generation import sample_text
from recipe.evaluation.scoring import CPU_TOKENS, Totals, exp_or_inf, sum_losses
from recipe.hardware.processes import largest_of_processes
from recipe.hardware.sharding import gathered
from recipe.model.loss import IGNORE_INDEX

# An evaluated row costs a third (estimated, GPU) to 0.40 (measured, two CPU cores) of a trained one: forward only.
EVALUATED_ROW_COST = 0.4
EVALUATION_SHARE = 0.02  # share of the run's time for all evaluations together, with `max_eval_samples auto`
MIN_ROWS = 8
GUESSED_STEPS = 1000  # assumed for a run that only `max_minutes` limits


def count_eval_rows(config: TrainConfig, num_validation_rows: int, num_datasets: int = 1) -> int:
    """Return how many rows of a dataset an evaluation uses; `auto`: evaluations take `EVALUATION_SHARE` of the run.

    The number depends on the options alone, so that a run evaluates the same rows on any hardware.
    """
    num_rows = config.max_eval_samples
    if num_rows == "all":
        return num_validation_rows
    if not isinstance(num_rows, int):  # auto
        num_steps = config.max_steps or GUESSED_STEPS
        period = int(config.eval_steps or num_steps)
        num_evaluations = 1 + -(-num_steps // period)  # one before the first
        budget = EVALUATION_SHARE * num_steps * config.global_batch_size / EVALUATED_ROW_COST / num_evaluations
        num_rows = max(MIN_ROWS, int(budget / num_datasets))
    return min(num_rows, num_validation_rows)


def evaluate_rows(
    module: Callable,
    is_text: torch.Tensor,
    rows: Any,
    num_rows: int,
    batch_size: int,
    must_stop: Callable[[], bool] = lambda: False,
) -> Totals | None:
    """Sum the losses of rows spread evenly over a split, each counted once on any number of processes.

    module, is_text, must_stop, and the result: as for `sum_losses`. rows: a split, indexed by int64 [n] for int64
    [n, block_size + 1].
    """
    state = PartialState()

    def read_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batches = iterate_validation(rows, num_rows, batch_size, state.process_index, state.num_processes)
        for ids, num_real in batches:
            batch = to_device(torch.as_tensor(ids), is_text.device)
            targets = batch[:, 1:].clone()
            targets[num_real:] = IGNORE_INDEX  # rows that repeat others to complete the batch
            yield batch[:, :-1], targets

    num_batches = -(-num_rows // (batch_size * state.num_processes))
    return sum_losses(module, is_text, read_batches(), num_batches, "evaluating", must_stop)


def mean_scores(datasets: dict[str, dict[str, Any]], shares: dict[str, float]) -> dict[str, Any]:
    """Return the scores of a mixture, and those of each dataset."""
    loss = sum(shares[name] * scores["loss"] for name, scores in datasets.items())
    bits = None
    if all(scores["bits_per_byte"] is not None for scores in datasets.values()):
        bits = sum(shares[name] * scores["bits_per_byte"] for name, scores in datasets.items())
    return {"loss": loss, "perplexity": exp_or_inf(loss), "bits_per_byte": bits, "mixture": datasets}


class Validation:
    """Evaluates the model on the validation rows that the options choose.

    num_rows: validation rows per evaluation.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, module: nn.Module, dataset: Any) -> None:
        """config: a run's, whose micro-batch is used on a GPU, where it fits. module: a `LanguageModelingLoss`."""
        self.config = config
        self.accelerator = accelerator
        self.module = module
        self.dataset = dataset
        on_cpu = accelerator.device.type == "cpu"
        rows = CPU_TOKENS // config.block_size if on_cpu else int(config.per_device_train_batch_size or 1)
        self.batch_size = max(1, rows)
        self.model = accelerator.unwrap_model(module).model
        self.parts = getattr(dataset, "parts", None) or {None: dataset}
        self.rows = {
            name: count_eval_rows(config, len(of.validation), len(self.parts)) for name, of in self.parts.items()
        }
        self.num_rows = sum(self.rows.values())
        self.is_text = torch.from_numpy(text_ids(dataset.tokenizer)).to(accelerator.device)
        self.vocab_size = len(self.is_text)
        self.bytes_per_token = {name: bytes_per_token(part) for name, part in self.parts.items()}

    def run(self, must_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return the results of an evaluation, or None if `must_stop` ended it.

        They are: loss (nats per token), perplexity, bits_per_byte, num_rows, seconds, warm_seconds (without the first
        batch, which may compile), and a sample of the model's text. For a mixture, loss and bits_per_byte are means
        weighted by the shares, and `mixture` has the results of each dataset. must_stop: asked between batches, with
        the same answer on all processes.
        """
        self.module.eval()
        try:
            with gathered(self.module):
                return self._run(must_stop)
        finally:
            self.module.train()

    def _run(self, must_stop: Callable[[], bool]) -> dict[str, Any] | None:
        started_at = time.perf_counter()
        datasets = {}
        batch_seconds = []

        def module(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
            begun_at = time.perf_counter()
            results = self.module(*batch)
            batch_seconds.append(time.perf_counter() - begun_at)
            return results

        for name, part in self.parts.items():
            num_rows = self.rows[name]
            totals = evaluate_rows(module, self.is_text, part.validation, num_rows, self.batch_size, must_stop)
            if totals is None:
                return None
            scores = totals.scores(totals.num_bytes(self.bytes_per_token[name]))
            datasets[name] = scores | {"num_rows": num_rows}
        results = mean_scores(datasets, self.dataset.shares) if len(datasets) > 1 else scores
        # The prepared module enters autocast by itself, its model does not. Eager mode, because inputs of all lengths
        # would compile the blocks of a sharded model again and again.
        with self.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            sample = self._sample()
        # The same on all processes, because a time-limited run computes its progress from it; only one makes a sample.
        seconds = time.perf_counter() - started_at
        seconds, warm_seconds = largest_of_processes(seconds, seconds - batch_seconds[0])
        return {
            **results,
            "num_rows": self.num_rows,
            "seconds": seconds,
            "warm_seconds": warm_seconds,
            "sample": sample,
        }

    def _sample(self) -> str | None:
        """Return a continuation of `sample_prompt`, the same for the same weights. A failure must not end the run."""
        if not self.accelerator.is_main_process:
            return None
        prompt = self.config.sample_prompt or ""
        tokenizer = self.dataset.tokenizer
        try:
            return sample_text(self.model, tokenizer, prompt, self.config.seed, self.vocab_size)
        except Exception as error:  # for example out of memory
            print(f"warning: no sample could be generated: {short_reason(error)}", flush=True)
            return None
