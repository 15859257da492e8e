"""Validation loss, perplexity and bits per byte over some or all validation rows, and the scores of tasks."""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from recipe.config import TrainConfig
from recipe.data.batches import iterate_validation
from recipe.data.packed import validation_tokens_per_byte
from recipe.errors import short_reason
from recipe.evaluation.generation import sample_text
from recipe.evaluation.scoring import CPU_TOKENS, show_progress, summarize_loss
from recipe.evaluation.tasks import load_tasks
from recipe.hardware.host_memory import FreedMemory
from recipe.model.loss import IGNORE_INDEX

# An evaluated row costs a third (estimated, GPU) to 0.40 (measured, two CPU cores) of a trained one: forward only.
EVALUATED_ROW_COST = 0.4
EVALUATION_SHARE = 0.02  # of the run's time, for all evaluations together, with `max_eval_samples auto`
FEWEST_ROWS = 8
GUESSED_STEPS = 1000  # of a run that only `max_minutes` limits
TASK_SECONDS = 30.0  # per task and evaluation; scripts/evaluate_model.py scores all examples


def count_eval_rows(config: TrainConfig, num_validation_rows: int) -> int:
    """Return how many validation rows an evaluation uses; `auto`: `EVALUATION_SHARE` of the run for all of them.

    The number depends on the options alone, so that a run evaluates the same rows on any hardware.
    """
    num_rows = config.max_eval_samples
    if num_rows == "all":
        return num_validation_rows
    if num_rows == "auto":
        num_steps = config.max_steps or GUESSED_STEPS
        num_evaluations = 1 + (-(-num_steps // config.eval_steps) if config.eval_steps else 1)  # one before the first
        budget = EVALUATION_SHARE * num_steps * config.global_batch_size / EVALUATED_ROW_COST / num_evaluations
        num_rows = max(FEWEST_ROWS, int(budget))
    return min(num_rows, num_validation_rows)


class Validation:
    """Evaluates the model on the validation rows, and the tasks, that the options choose.

    num_rows: validation rows per evaluation.
    """

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, module: nn.Module, dataset: Any, micro_batch_size: int
    ) -> None:
        """module: a prepared `LanguageModelingLoss`. micro_batch_size: the batch size on a GPU, where it fits."""
        self.config, self.accelerator, self.module, self.dataset = config, accelerator, module, dataset
        on_cpu = accelerator.device.type == "cpu"
        self.batch_size = max(1, CPU_TOKENS // config.block_size) if on_cpu else micro_batch_size
        # Not compiled: texts of all lengths would compile it again and again.
        self.model = accelerator.unwrap_model(module).model
        self.tasks = load_tasks(config.eval_tasks, dataset.tokenizer, self.model.config.max_position_embeddings)
        self.num_rows = count_eval_rows(config, len(dataset.validation))
        self.tokens_per_byte = validation_tokens_per_byte(dataset)

    @torch.no_grad()
    def run(self, must_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Evaluate rows spread evenly over the split, each counted once on any number of processes.

        must_stop: asked between batches, with the same answer on all processes; if it is true, the evaluation is
        given up and the result is None. Returns loss (nats per token), perplexity, bits_per_byte, num_rows and
        seconds; for each task its scores under flat names: hellaswag_acc, hellaswag_acc_stderr,
        hellaswag_num_examples, ...; and a sample of the model's text.
        """
        started_at = time.perf_counter()
        self.module.eval()
        try:
            metrics = self._run_rows(must_stop)
            scores = self._run_tasks(must_stop) if metrics is not None else None
        finally:
            self.module.train()
        if scores is None:
            return None
        sample = self._sample()
        seconds = time.perf_counter() - started_at
        return {**metrics, **scores, "num_rows": self.num_rows, "seconds": seconds, "sample": sample}

    def _run_rows(self, must_stop: Callable[[], bool]) -> dict[str, float] | None:
        accelerator, block_size = self.accelerator, self.config.block_size
        num_batches = -(-self.num_rows // (self.batch_size * accelerator.num_processes))
        batches = iterate_validation(
            self.dataset.validation,
            self.num_rows,
            self.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        losses = torch.zeros(num_batches, device=accelerator.device)  # allocated once, so memory stays flat
        num_tokens = torch.zeros(num_batches, dtype=torch.float64)  # on the host: not every device has float64
        freed_memory = FreedMemory()
        for i, (rows, num_real) in enumerate(show_progress(batches, "evaluating", "batch", num_batches)):
            if must_stop():
                return None
            batch = torch.as_tensor(rows).to(accelerator.device)
            targets = batch[:, 1:].clone()
            targets[num_real:] = IGNORE_INDEX
            losses[i] = self.module(batch[:, :-1], targets)["loss"]
            num_tokens[i] = num_real * block_size
            freed_memory.give_back()
        loss_sum = losses.cpu().double() @ num_tokens
        if accelerator.num_processes > 1:
            loss_sum = accelerator.reduce(loss_sum.to(accelerator.device), reduction="sum")
        return summarize_loss(loss_sum.item(), self.num_rows * block_size, self.tokens_per_byte)

    def _run_tasks(self, must_stop: Callable[[], bool]) -> dict[str, float | None] | None:
        scores, vocab_size = {}, len(self.dataset.tokenizer)
        for task in self.tasks:
            with self.accelerator.autocast():
                found = task.run(
                    self.model,
                    vocab_size,
                    self.batch_size * self.config.block_size,
                    max_seconds=TASK_SECONDS,
                    must_stop=must_stop,
                )
            if found is None:
                return None
            scores |= {f"{task.name}_{key}": value for key, value in found.items()}
        return scores

    def _sample(self) -> str | None:
        """Return a continuation of `sample_prompt`, the same for the same weights. A failure must not end the run."""
        if not self.accelerator.is_main_process:
            return None
        prompt, tokenizer = self.config.sample_prompt, self.dataset.tokenizer
        try:
            return sample_text(self.model, tokenizer, prompt, seed=self.config.seed, vocab_size=len(tokenizer))
        except Exception as error:  # for example out of memory
            print(f"warning: no sample could be generated: {short_reason(error)}", flush=True)
            return None
