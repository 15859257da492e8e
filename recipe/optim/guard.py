"""Skip updates whose gradients are not finite."""

import torch
from accelerate import Accelerator

MOST_BAD_STEPS = 10  # in a row, before the run ends


class UpdateGuard:
    """Decides whether an update is made, and counts those that are skipped because a gradient is not finite.

    A loss that is not finite on any process makes every gradient NaN on all of them (recipe/model/loss.py), so they
    agree without communication. A skipped update consumes its step and its learning rate.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # On the device: updates skipped so far, and bad updates in a row.
        self.counts = torch.zeros(2, device=accelerator.device)

    def allows(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
        """Return whether to call the optimizer's `step`.

        A fused optimizer may always be called: its kernel reads `found_inf` on the device, and changes nothing if it
        is 1. For other optimizers, and on MPS, whose kernel ignores it (pytorch#186360), the host waits for the
        device.

        loss: this process's mean. grad_norm: of the accumulated, unscaled gradients.
        """
        skipped = bad = ~torch.isfinite(grad_norm)
        if (scaler := self.accelerator.scaler) is not None:
            scaler.update()
            # Overflowing gradients only lower the scale, which helps until it is below 1.
            loss = self.accelerator.reduce(loss, reduction="mean")  # pyright: ignore[reportAssignmentType]  # a tensor
            is_low = scaler._scale < 1  # pyright: ignore[reportOptionalOperand]  # a tensor since the first backward
            bad = bad & (~torch.isfinite(loss) | is_low.view(()))
        self.counts = torch.stack([self.counts[0] + skipped, (self.counts[1] + bad) * bad])
        if not optimizer.defaults.get("fused") or self.accelerator.device.type == "mps":
            return not skipped.item()
        optimizer.found_inf = skipped.float()  # pyright: ignore[reportAttributeAccessIssue]  # as GradScaler does
        return True
