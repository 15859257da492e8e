"""The numbers of a log line. The host waits for the device when it reads them."""

import time

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from recipe.checkpoint.load import RunState
from recipe.config import TrainConfig
from recipe.data.batches import TrainBatches
from recipe.hardware.devices import peak_flops_per_second, peak_memory_bytes
from recipe.model.size import count_flops_per_token
from recipe.optim.guard import GuardedUpdate


class StepMeter:
    """Averages the loss between log lines, and measures throughput. Its clock excludes evaluation and saving."""

    def __init__(
        self, config: TrainConfig, accelerator: Accelerator, model: PreTrainedModel, state: RunState, started_at: float
    ) -> None:
        """state: continues the average of a resumed run. started_at: of the program, from `time.perf_counter`."""
        self.accelerator, self.device, self.started_at = accelerator, accelerator.device, started_at
        self.tokens_per_step = config.global_batch_size * config.block_size
        self.flops_per_token = count_flops_per_token(model.config, model.num_parameters(), config.block_size)
        self.loss_sum, self.num_losses = torch.tensor(state.loss_sum, device=self.device), state.num_losses
        self.laps: list[tuple[int, float]] = []  # tokens and seconds between log lines
        self.lap_steps = 0
        self.seconds_to_first_step: float | None = None
        self.created_at = self.lap_started_at = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of one step, which stays on the device. loss: fp32 scalar of this process."""
        self.loss_sum += loss
        self.num_losses += 1
        self.lap_steps += 1

    def read(
        self, state: RunState, update: GuardedUpdate, grad_norm: torch.Tensor, batches: TrainBatches
    ) -> dict[str, float | None]:
        """Return the numbers since the last log line, and add their time to the state.

        Loss and gradient norm are means over the processes; waiting and memory are this process's.
        """
        numbers = torch.cat([torch.stack([self.loss_sum / self.num_losses, grad_norm]), update.numbers()])
        loss, norm, applied, skipped, bad = self.accelerator.reduce(numbers, reduction="mean").tolist()
        waited = batches.take_wait()  # after `tolist`, for which the device had to finish
        seconds, num_tokens = time.perf_counter() - self.lap_started_at, self.lap_steps * self.tokens_per_step
        self.laps.append((num_tokens, seconds))
        self.loss_sum, self.num_losses = torch.zeros((), device=self.device), 0
        self.resume()
        state.train_seconds += seconds
        self.seconds_to_first_step = self.seconds_to_first_step or time.perf_counter() - self.started_at
        peak = peak_flops_per_second(self.device)
        flops = num_tokens / seconds * self.flops_per_token
        return {
            "tokens_seen": state.step * self.tokens_per_step,
            "loss": loss,
            "learning_rate": update.learning_rates[max(0, int(applied) - 1)],
            "grad_norm": norm,
            "tokens_per_second": num_tokens / seconds,
            "train_seconds": state.train_seconds,
            "mfu": flops / (peak * self.accelerator.num_processes) if peak else None,
            "steps_left_out": int(skipped),
            "bad_steps_in_a_row": int(bad),
            "share_outside_training": self.share_outside_training,
            "share_waiting_for_data": None if waited is None else min(1.0, waited / seconds),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }

    def resume(self) -> None:
        """Restart the clock after something that was not training."""
        self.lap_started_at, self.lap_steps = time.perf_counter(), 0

    def store(self, state: RunState) -> None:
        """Put the unfinished average and lap into the state of a checkpoint. The host waits for the device."""
        state.loss_sum = self.accelerator.reduce(self.loss_sum, reduction="mean").item()
        state.num_losses = self.num_losses
        state.train_seconds += time.perf_counter() - self.lap_started_at

    @property
    def share_outside_training(self) -> float:
        """The fraction of the time since the start of the loop that evaluation and saving took."""
        elapsed = time.perf_counter() - self.created_at
        return max(0.0, 1 - sum(seconds for _, seconds in self.laps) / elapsed)

    @property
    def tokens_per_second(self) -> float:
        """Over all laps except the first, which includes compilation and warm-up, unless it is the only one."""
        tokens, seconds = map(sum, zip(*(self.laps[1:] or self.laps), strict=True)) if self.laps else (0, 0.0)
        return tokens / seconds if seconds else 0.0
