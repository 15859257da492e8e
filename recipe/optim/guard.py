"""The update, which is skipped if a gradient is not finite."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

MOST_BAD_STEPS = 10  # in a row, before the run ends


class UpdateGuard:
    """Updates the parameters, and counts the updates that are skipped because a gradient is not finite.

    A loss that is not finite on any process makes every gradient NaN on all of them (recipe/model/loss.py), so they
    agree without communication. With a fused optimizer the host does not wait for the device: the kernel itself skips
    the update. Other optimizers wait at least once per step. A skipped update consumes its step and its learning rate.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # Updates skipped so far, and bad ones in a row. On the device.
        self.counts = torch.zeros(2, device=accelerator.device)

    def step(self, optimizer: AcceleratedOptimizer, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """optimizer: prepared. loss: this process's mean. grad_norm: of the accumulated, unscaled gradients."""
        inner, scaler = optimizer.optimizer, self.accelerator.scaler
        finite = torch.isfinite(grad_norm)
        if inner.defaults.get("fused"):
            inner.found_inf = (~finite).float()  # with a 1, the kernel changes nothing
            inner.step()
        elif finite.item():
            inner.step()
        bad = ~finite
        if scaler is not None:
            scaler.update()
            # Overflowing gradients only lower the scale, which helps until it is below 1.
            loss = self.accelerator.reduce(loss, reduction="mean")
            bad = bad & (~torch.isfinite(loss) | (scaler._scale < 1).view(()))
        self.counts = torch.stack([self.counts[0] + (~finite), (self.counts[1] + bad) * bad])
