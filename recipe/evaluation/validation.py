"""Validation loss, perplexity and bits per byte over some or all validation rows, and the scores of tasks."""

import time
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from recipe.checkpoint.load import RunState
from recipe.config import TrainConfig
from recipe.data.batches import iterate_validation
from recipe.data.packed import PackedDataset
from recipe.errors import short_reason
from recipe.evaluation.generation import sample_text
from recipe.evaluation.scoring import CPU_TOKENS, show_progress, summarize_loss
from recipe.evaluation.tasks import load_tasks
from recipe.hardware.host_memory import FreedMemory
from recipe.model.loss import IGNORE_INDEX
from recipe.run.plan import count_eval_rows


class Validation:
    """Evaluates the model on the validation rows, and the tasks, that the options choose.

    num_rows: validation rows per evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        module: nn.Module,
        dataset: PackedDataset,
        micro_batch_size: int,
    ) -> None:
        """module: a prepared `LanguageModelingLoss`. micro_batch_size: the batch size on a GPU, where it fits."""
        self.accelerator, self.module, self.dataset = accelerator, module, dataset
        self.batch_size = config.per_device_eval_batch_size or micro_batch_size
        if config.per_device_eval_batch_size is None and accelerator.device.type == "cpu":
            self.batch_size = max(1, CPU_TOKENS // config.block_size)
        # Not compiled: texts of all lengths would compile it again and again.
        self.model, self.tokenizer = accelerator.unwrap_model(module).model, dataset.load_tokenizer()
        self.tasks = load_tasks(config.eval_tasks, self.tokenizer, self.model.config.max_position_embeddings)
        self.config = config
        self.set_schedule(config)

    def set_schedule(self, config: TrainConfig) -> None:
        """Choose the rows for this number of steps and evaluations."""
        self.is_auto = config.max_eval_samples == "auto" and not config.eval_only
        rows_per_forward = self.batch_size * self.accelerator.num_processes
        self.num_rows = count_eval_rows(config, len(self.dataset.splits["validation"]), rows_per_forward)

    def keep_rows(self, state: RunState) -> None:
        """Evaluate a resumed run on the same rows: take their number from its state, or store it there."""
        if self.is_auto:
            self.num_rows = state.eval_rows = state.eval_rows or self.num_rows

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Evaluate rows spread evenly over the split, each counted once on any number of processes.

        Returns loss (nats per token), perplexity, bits_per_byte, num_rows and seconds; for each task its scores under
        flat names: hellaswag_acc, hellaswag_acc_stderr, hellaswag_num_examples, ...; and a sample of the model's text.
        """
        started_at = time.perf_counter()
        accelerator, num_processes = self.accelerator, self.accelerator.num_processes
        num_rows = self.num_rows
        num_batches = -(-num_rows // (self.batch_size * num_processes))
        losses = torch.zeros(num_batches, device=accelerator.device)  # allocated once, so memory stays flat
        num_tokens = torch.zeros(num_batches, dtype=torch.float64)  # on the host: not every device has float64
        split = self.dataset.splits["validation"]
        rows_of_batches = iterate_validation(
            split, num_rows, self.batch_size, accelerator.process_index, num_processes
        )
        bar = show_progress(rows_of_batches, "evaluating", "batch", num_batches)
        freed_memory = FreedMemory()
        self.module.eval()
        for i, (rows, num_real) in enumerate(bar):
            batch = torch.from_numpy(rows).to(accelerator.device)
            targets = batch[:, 1:].clone()
            targets[num_real:] = IGNORE_INDEX
            losses[i] = self.module(batch[:, :-1], targets)
            num_tokens[i] = num_real * self.dataset.block_size
            freed_memory.give_back()
        scores = self._run_tasks()
        self.module.train()
        loss_sum = losses.cpu().double() @ num_tokens
        if num_processes > 1:
            loss_sum = accelerator.reduce(loss_sum.to(accelerator.device), reduction="sum")
        metrics = summarize_loss(
            loss_sum.item(), num_rows * self.dataset.block_size, self.dataset.tokens_per_byte("validation")
        )
        seconds = time.perf_counter() - started_at
        return {**metrics, **scores, "num_rows": num_rows, "seconds": seconds, "sample": self._sample()}

    def _run_tasks(self) -> dict[str, float | None]:
        scores, limit = {}, self.config.max_eval_task_seconds
        tokens_per_batch = self.batch_size * self.dataset.block_size
        for task in self.tasks:
            with self.accelerator.autocast():
                found = task.run(self.model, self.dataset.vocab_size, tokens_per_batch, max_seconds=limit)
            scores |= {f"{task.name}_{key}": value for key, value in found.items()}
        return scores

    def _sample(self) -> str | None:
        """Return a continuation of `sample_prompt`, the same for the same weights. A failure must not end the run."""
        if self.config.eval_only or not self.accelerator.is_main_process:
            return None
        prompt, seed = self.config.sample_prompt, self.config.seed
        try:
            return sample_text(self.model, self.tokenizer, prompt, seed=seed, vocab_size=self.dataset.vocab_size)
        except Exception as error:  # for example out of memory
            print(f"warning: no sample could be generated: {short_reason(error)}", flush=True)
            return None
