"""Optimizer, learning-rate schedule, and the update that leaves out bad numbers."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from recipe.config import TrainConfig
from recipe.errors import ProcessError
from recipe.optim.optimizers import compute_learning_rates

MOST_OVERFLOWS = 50  # in a row: fp16's scale starts at 2**16, and no use is left of one that was halved so often
SPIKE_WINDOW, SPIKE_WINDOW_MIN = 128, 32  # updates that a spike is measured against


class GuardedUpdate:
    """One optimizer update: the schedule's learning rate, and no update at all where a gradient is not finite.

    A NaN or Inf loss on any process makes every gradient NaN on all of them (recipe/model/loss.py), so they agree
    without a word. With fused AdamW nothing here makes the host wait for the device: whether to update, and which
    learning rate comes next, are tensors there, and an update that is left out does not move the schedule, the fp16
    scaler's neither (Accelerate 1.15 cannot tell that a fused optimizer was skipped).
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
        """optimizer: a prepared one."""
        self.accelerator, self.optimizer, self.spike_sigmas = accelerator, optimizer.optimizer, config.spike_sigmas
        device = accelerator.device
        self.set_schedule(config)
        self.applied = torch.zeros(1, dtype=torch.int64, device=device)
        self.left_out = torch.zeros(1, dtype=torch.int64, device=device)
        self.left_out_in_a_row = torch.zeros(1, dtype=torch.int64, device=device)
        self.bad_in_a_row = torch.zeros(1, dtype=torch.int64, device=device)
        self.most_in_a_row = torch.zeros(1, dtype=torch.int64, device=device)  # since `numbers` was read
        self.recent = torch.zeros(SPIKE_WINDOW, 2, device=device)  # loss and gradient norm of the latest updates

    def set_schedule(self, config: TrainConfig) -> None:
        """Follow the config's schedule from the next update on."""
        self.learning_rates = compute_learning_rates(config)
        self.table = torch.tensor(self.learning_rates, dtype=torch.float32, device=self.accelerator.device)

    def step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """loss: of this process, over the whole step. grad_norm: of the accumulated, unscaled gradients."""
        scaler = self.accelerator.scaler
        if scaler is not None or self.spike_sigmas is not None:
            loss = self.accelerator.reduce(loss, reduction="mean")  # on the devices: all must come to the same answer
        finite = torch.isfinite(grad_norm).view(1)
        bad = ~finite
        if scaler is not None:  # an overflow of the scaled gradients is no bad number: the scale is lowered for it
            bad = bad & (~torch.isfinite(loss).view(1) | (self.left_out_in_a_row >= MOST_OVERFLOWS))
        if self.spike_sigmas is not None:
            spike = finite & self._is_spike(loss, grad_norm)
            finite, bad = finite & ~spike, bad | spike
        self.bad_in_a_row = (self.bad_in_a_row + bad) * bad
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.bad_in_a_row)
        learning_rate = self.table.gather(0, self.applied.clamp(max=len(self.table) - 1)).view(())
        fused = self.optimizer.defaults["fused"]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate if fused else learning_rate.item()
        try:
            if fused:  # the kernel itself leaves everything as it is where found_inf is 1
                self.optimizer.found_inf = (~finite).float().view(())
                self.optimizer.step()
            elif finite.item():
                self.optimizer.step()
        except torch.OutOfMemoryError as error:  # a part of the update may be done: not a step to take again
            raise ProcessError(
                "out of memory in the optimizer; go on with --resume_from_checkpoint auto and a smaller "
                "--per_device_train_batch_size, --loss_chunks 8 or --activation_checkpointing"
            ) from error
        if scaler is not None:
            scaler.update()
        self.applied += finite
        self.left_out += ~finite
        self.left_out_in_a_row = (self.left_out_in_a_row + ~finite) * ~finite

    def _is_spike(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Whether loss or gradient norm is more than spike_sigmas standard deviations above the latest updates."""
        values = torch.stack([loss, grad_norm.to(loss.dtype)])
        count = self.applied.clamp(max=SPIKE_WINDOW)
        counted = (torch.arange(SPIKE_WINDOW, device=count.device) < count)[:, None]
        mean = (self.recent * counted).sum(0) / count
        deviation = (((self.recent - mean) ** 2 * counted).sum(0) / count).sqrt()
        spike = ((values > mean + self.spike_sigmas * deviation).any() & (count >= SPIKE_WINDOW_MIN)).view(1)
        keep = spike | ~torch.isfinite(values).all()
        slot = self.applied % SPIKE_WINDOW
        self.recent[slot] = torch.where(keep, self.recent[slot], values)
        return spike

    def numbers(self) -> torch.Tensor:
        """For the log line, and to be read with it: updates made, left out, and most bad ones in a row since then."""
        read = torch.cat([self.applied, self.left_out, self.most_in_a_row]).float()
        self.most_in_a_row = self.bad_in_a_row.clone()
        return read

    def state_dict(self) -> dict:
        names = ("applied", "left_out", "left_out_in_a_row", "bad_in_a_row", "recent")
        guard = {name: getattr(self, name) for name in names}
        return {"optimizer": self.optimizer.state_dict(), "guard": guard}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for name, tensor in state["guard"].items():
            setattr(self, name, tensor.to(self.accelerator.device))
