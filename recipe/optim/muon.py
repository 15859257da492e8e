"""Muon for the hidden matrices, AdamW for everything else.

Muon replaces the momentum of each matrix by the nearest matrix whose singular values are all one, so that rare
directions move as far as common ones (Jordan et al., https://kellerjordan.github.io/posts/muon). Its updates are as
large as AdamW's (Moonlight, arXiv 2502.16982).
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from transformers.pytorch_utils import Conv1D

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the fastest, with singular values between 0.7 and 1.2
FIRST_MOMENTUM, MOMENTUM_WARMUP_UPDATES = 0.85, 300  # modded-nanogpt
ADAMW_RMS = 0.2  # root mean square of a typical AdamW update before the learning rate (Moonlight)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay for one group; fused AdamW for the others.

    It never waits for the device. If `found_inf`, an fp32 scalar on the device, is 1, a step changes nothing. With
    several processes, each orthogonalizes its share of the matrices, and all of them apply the same updates.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype = torch.float32,
        cautious: bool = False,
    ) -> None:
        """groups: with `weight_decay`. Muon's also has `num_matrices` (from `find_matrices`), `momentum` and
        `lr_ratio`, its learning rate divided by AdamW's.

        dtype: of the matrix products. cautious: decay only weights that the update moves towards zero, too
        (arXiv 2510.12402).
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": True})
        self.dtype, self.cautious, self.found_inf = dtype, cautious, None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            (self._step_muon if "num_matrices" in group else self._step_adamw)(group)

    def _step_adamw(self, group: dict) -> None:
        parameters = group["params"]
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"step": p.new_zeros(()), "exp_avg": torch.zeros_like(p)}
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        means, squares, steps = (
            [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False}
        gradients = [p.grad for p in parameters]
        adamw(parameters, gradients, means, squares, [], steps, fused=True, found_inf=self.found_inf, **options)

    def _step_muon(self, group: dict) -> None:
        """Stack matrices of equal shape, with the longer side as columns, and update each stack at once."""
        keep = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        learning_rate = group["lr"] * group["lr_ratio"] * keep
        stacks = defaultdict(list)
        momenta = self._add_to_momenta(group, keep)
        for whole in zip(group["params"], momenta, group["num_matrices"], strict=True):
            for weight, momentum in zip(*(tensor.chunk(whole[2], dim=1) for tensor in whole[:2]), strict=True):
                pair = (weight.mT, momentum.mT) if weight.shape[0] > weight.shape[1] else (weight, momentum)
                stacks[pair[0].shape].append(pair)
        for shape, pairs in stacks.items():
            weights, momenta = zip(*pairs, strict=True)
            updates = self._orthogonalize_shared(torch.stack(momenta)).float() * (ADAMW_RMS * shape[1] ** 0.5)
            decay = torch.stack(weights)
            if self.cautious:
                decay = decay * (decay * updates > 0)
            change = (updates + group["weight_decay"] * decay) * learning_rate
            torch._foreach_sub_(weights, change.unbind())

    def _add_to_momenta(self, group: dict, keep: torch.Tensor | float) -> list[torch.Tensor]:
        """Add the gradients to the momenta and return Nesterov's: where the momenta would be one step later.

        Momentum rises during the first updates. keep: 0 leaves everything as it is, even if gradients are NaN.
        """
        parameters = group["params"]
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"step": p.new_zeros(()), "momentum_buffer": torch.zeros_like(p)}
        steps, buffers = ([self.state[p][name] for p in parameters] for name in ("step", "momentum_buffer"))
        gradients = [p.grad if isinstance(keep, float) else torch.where(keep > 0, p.grad, 0.0) for p in parameters]
        warm = (steps[0] / MOMENTUM_WARMUP_UPDATES).clamp(max=1.0)
        momentum = FIRST_MOMENTUM + (group["momentum"] - FIRST_MOMENTUM) * warm
        torch._foreach_mul_(buffers, 1.0 - (1.0 - momentum) * keep)
        torch._foreach_add_(buffers, gradients)
        torch._foreach_add_(steps, keep)
        ahead = torch._foreach_mul(buffers, momentum)
        torch._foreach_add_(ahead, gradients)
        return ahead

    def _orthogonalize_shared(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalize this process's share of the matrices, and exchange the results. [n, rows, columns], fp32."""
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        if num_processes == 1:
            return orthogonalize(matrices, self.dtype)
        share = -(-len(matrices) // num_processes)
        mine = matrices[dist.get_rank() * share :][:share]
        padded = matrices.new_zeros(share, *matrices.shape[1:], dtype=self.dtype)
        padded[: len(mine)] = orthogonalize(mine, self.dtype)
        gathered = padded.new_empty(num_processes * share, *matrices.shape[1:])
        dist.all_gather_into_tensor(gathered, padded)
        return gathered[: len(matrices)]


def orthogonalize(matrices: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Replace the singular values of matrices by values near 1, by Newton-Schulz iteration.

    matrices: fp32 [n, rows, columns], rows <= columns (the other way round costs more). Returns the same shape in
    dtype, the type of the products. The singular values of the result are between 0.7 and 1.2, except that very small
    ones stay smaller.
    """
    a, b, c = COEFFICIENTS
    x = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(NUM_ITERATIONS):  # a x + b (x x^T) x + c (x x^T)^2 x
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def find_matrices(module: nn.Module) -> dict[nn.Parameter, int]:
    """Return the weights of all projections inside the blocks, and of how many matrices each consists.

    GPT-2's `c_attn` holds three, for queries, keys and values, side by side.
    """
    model = next(m for m in module.modules() if hasattr(m, "get_output_embeddings"))
    return {
        layer.weight: 3 if name.endswith(".c_attn") else 1
        for name, layer in model.named_modules()
        if isinstance(layer, (Conv1D, nn.Linear)) and layer is not model.get_output_embeddings()
    }
