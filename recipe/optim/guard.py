"""The guarded update: the schedule's learning rate, and no update from bad numbers."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from recipe.config import TrainConfig
from recipe.errors import ProcessError
from recipe.optim.schedule import compute_learning_rates

MOST_OVERFLOWS = 50  # in a row: fp16's loss scale starts at 2**16 and is useless after 50 halvings
MOST_BAD_STEPS = 10  # in a row, before the run stops


class GuardedUpdate:
    """One optimizer update with the schedule's learning rate; skips the update if a gradient is not finite.

    A NaN or Inf loss on any process makes every gradient NaN on all of them (recipe/model/loss.py), so they agree
    without communication. With fused AdamW and Muon the host never waits for the device here: the decision and the
    learning rate are tensors on the device. The other optimizers take them from the host, which waits once per step
    (bitsandbytes 0.50 also waits after each parameter). A skipped update does not advance the schedule, not even after
    an fp16 overflow (Accelerate 1.15 cannot tell that a fused optimizer skipped).
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
        """optimizer: the prepared one."""
        self.accelerator, self.optimizer = accelerator, optimizer.optimizer
        self.set_schedule(config)
        # Updates made, skipped, skipped in a row, bad in a row, and the most bad in a row since `numbers` was called.
        counts = torch.zeros(5, 1, dtype=torch.int64, device=accelerator.device)
        self.applied, self.left_out, self.left_out_in_a_row, self.bad_in_a_row, self.most_in_a_row = counts

    def set_schedule(self, config: TrainConfig) -> None:
        """Use the config's schedule from the next update on."""
        self.learning_rates = compute_learning_rates(config)
        self.table = torch.tensor(self.learning_rates, dtype=torch.float32, device=self.accelerator.device)

    def step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Update the parameters, or skip the update.

        loss: scalar, this process's mean over the step. grad_norm: scalar, of the accumulated, unscaled gradients.
        """
        scaler = self.accelerator.scaler
        finite = torch.isfinite(grad_norm).view(1)
        bad = ~finite
        if scaler is not None:  # scaled gradients that overflow are not bad: they lower the scale
            loss = self.accelerator.reduce(loss, reduction="mean")  # all processes must decide the same
            bad = bad & (~torch.isfinite(loss).view(1) | (self.left_out_in_a_row >= MOST_OVERFLOWS))
        self.bad_in_a_row = (self.bad_in_a_row + bad) * bad
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.bad_in_a_row)
        learning_rate = self.table.gather(0, self.applied.clamp(max=len(self.table) - 1)).view(())
        fused = self.optimizer.defaults.get("fused")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate if fused else learning_rate.item()
        try:
            if fused:  # the kernel itself skips the update if found_inf is 1
                self.optimizer.found_inf = (~finite).float().view(())
                self.optimizer.step()
            elif finite.item():
                self.optimizer.step()
        except torch.OutOfMemoryError as error:  # part of the update may be done, so the step cannot be repeated
            raise ProcessError(
                "out of memory in the optimizer; resume with --resume_from_checkpoint auto and a smaller "
                "--per_device_train_batch_size, or --activation_checkpointing"
            ) from error
        if scaler is not None:
            scaler.update()
        self.applied += finite
        self.left_out += ~finite
        self.left_out_in_a_row = (self.left_out_in_a_row + ~finite) * ~finite

    def numbers(self) -> torch.Tensor:
        """Return float [3]: updates made, updates skipped, and the most bad ones in a row since the last call."""
        numbers = torch.cat([self.applied, self.left_out, self.most_in_a_row]).float()
        self.most_in_a_row = self.bad_in_a_row
        return numbers

    def state_dict(self) -> dict:
        names = ("applied", "left_out", "left_out_in_a_row", "bad_in_a_row")
        return {"optimizer": self.optimizer.state_dict(), "guard": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for name, tensor in state["guard"].items():
            setattr(self, name, tensor.to(self.accelerator.device))
