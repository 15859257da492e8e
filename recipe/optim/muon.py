"""Muon for the hidden matrices, AdamW for everything else.

Muon replaces the momentum of each matrix by the nearest matrix whose singular values are all one, so that rare
directions move as far as common ones (Jordan et al., https://kellerjordan.github.io/posts/muon). Within each matrix,
neurons whose recent updates were large then move less, and the others more (NorMuon, arXiv 2510.05491). The matrix as
a whole moves about as far as with AdamW (Moonlight, arXiv 2502.16982).
"""

import functools
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.adamw import adamw
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the fastest, with singular values between 0.7 and 1.2
# As in modded-nanogpt.
FIRST_MOMENTUM = 0.85
MOMENTUM = 0.95
MOMENTUM_WARMUP_UPDATES = 300
NEURON_BETA = 0.95  # decay of each neuron's running mean square update (NorMuon)
ADAMW_RMS = 0.2  # root mean square of a typical AdamW update before the learning rate (Moonlight)
STACK_VALUES = 2**26  # in a stack of matrices: bounds the temporary memory, and is more than enough work for a GPU
STACK_COPIES = 5  # most fp32 copies of a stack that an update holds at once

Views = list[torch.Tensor] | tuple[torch.Tensor, ...]  # one matrix, or several views of one fused tensor


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay for groups with `matrices`; AdamW for the others.

    It never waits for the device. If `found_inf`, an fp32 scalar on the device, is 1, a step changes nothing. With
    several processes, each orthogonalizes its share of the matrices. If every process holds all weights, all of them
    apply the same updates; if it holds shards (`DTensor`, sharded along the first dimension), each updates its own.
    """

    def __init__(
        self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """groups: with `weight_decay`; Muon's also has `matrices`, from `find_matrices`.

        dtype: of the matrix products.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": True})
        self.dtype = dtype
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            matrices = dict(zip(group["params"], group.get("matrices", ()), strict=False))
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = self._new_state(p, matrices[p][0] if matrices else None)
            if parameters:
                states = map(list, zip(*(self.state[p].values() for p in parameters), strict=True))
                step_group = self._step_muon if matrices else self._step_adamw
                step_group(group, parameters, *states)

    def _new_state(self, p: nn.Parameter, num_matrices: int | None) -> dict[str, torch.Tensor]:
        zeros = functools.partial(torch.zeros, dtype=p.dtype, device=p.device)  # whole on every process
        if num_matrices is None:
            return {"step": zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        squares = zeros((num_matrices, 1, max(p.shape[0], p.shape[1] // num_matrices)))
        return {"step": zeros(()), "momentum_buffer": torch.zeros_like(p), "neuron_squares": squares}

    def _step_adamw(self, group: dict, parameters: list, steps: list, means: list, squares: list) -> None:
        options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"]}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False}
        gradients = [p.grad for p in parameters]
        adamw(parameters, gradients, means, squares, [], steps, fused=True, found_inf=self.found_inf, **options)

    def _step_muon(self, group: dict, parameters: list, steps: list, momenta: list, neurons: list) -> None:
        """Update stacks of matrices of equal shape, with neurons as columns."""
        stacks = defaultdict(list)
        matrices_of = dict(zip(group["params"], group["matrices"], strict=True))
        for p, momentum, squares in zip(parameters, momenta, neurons, strict=True):
            _, is_turned = matrices_of[p]
            rows, columns = p.shape[0], p.shape[1] // len(squares)
            shards = MatrixShards.of(p, dim=2 if is_turned else 1)
            pieces = (_local(x).chunk(len(squares), dim=1) for x in (p, p.grad, momentum))
            for *views, square in zip(*pieces, squares, strict=True):
                wide = [view.mT for view in views] if is_turned else views
                stacks[min(rows, columns), max(rows, columns), shards].append([*wide, square])
        found_inf = torch.zeros_like(steps[0]) if self.found_inf is None else self.found_inf
        warmed_up = (steps[0] / MOMENTUM_WARMUP_UPDATES).clamp(max=1.0)
        coefficient = FIRST_MOMENTUM + (MOMENTUM - FIRST_MOMENTUM) * warmed_up
        for (rows, columns, shards), matrices in stacks.items():
            num_values = rows * columns // (shards.group.size() if shards else 1)
            size = max(_num_processes(), STACK_VALUES // num_values)
            for start in range(0, len(matrices), size):
                self._update_stack(matrices[start : start + size], shards, group, coefficient, found_inf)
        # Without alpha, torch (2.11 to 2.15) takes the overload for a number and waits for the device to read it.
        torch._foreach_add_(steps, 1 - found_inf, alpha=1)  # pyright: ignore[reportPrivateImportUsage]  # no other

    def _update_stack(
        self,
        matrices: list[Views],
        shards: "MatrixShards | None",
        group: dict,
        coefficient: torch.Tensor,
        found_inf: torch.Tensor,
    ) -> None:
        """Update a stack. matrices: (weight, gradient, momentum, mean squares of the neurons) each, of equal shape.

        shards: how weights, gradients and momenta are sharded; None if they are not.
        """
        weights, gradients, momenta, squares = zip(*matrices, strict=True)
        stack = torch.stack(gradients)
        before = torch.stack(momenta)
        after = torch.addcmul(stack, before, coefficient)
        _copy_unless(found_inf, momenta, before, after)
        stack.addcmul_(after, coefficient)  # Nesterov: where the momenta would be one step later
        del before, after  # the products need the memory
        if shards is None:
            updates = self._orthogonalize(stack)
        else:
            shape = stack.shape
            stack = shards.to_full(stack)
            updates = shards.to_shards(orthogonalize(stack, self.dtype), shape)
        updates = updates.float()
        before = torch.stack(squares)
        scales, after = even_out_neurons(updates, before, shards)
        _copy_unless(found_inf, squares, before, after)
        updates.mul_(ADAMW_RMS * before.shape[2] ** 0.5 * scales)
        stack = torch.stack(weights)
        updates.add_(stack, alpha=group["weight_decay"]).mul_(group["lr"])
        _copy_unless(found_inf, weights, stack, stack - updates)

    def _orthogonalize(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalize this process's share of [n, rows, columns], and exchange the results."""
        num_processes = _num_processes()
        if num_processes == 1:
            return orthogonalize(matrices, self.dtype)
        num_matrices = len(matrices)
        matrices = F.pad(matrices, (0, 0, 0, 0, 0, -num_matrices % num_processes))  # equal shares
        mine = orthogonalize(matrices.chunk(num_processes)[dist.get_rank()], self.dtype)
        gathered = mine.new_empty(matrices.shape)
        dist.all_gather_single(gathered, mine)
        return gathered[:num_matrices]


class MatrixShards(NamedTuple):
    """How a stack of matrices, [n, rows, columns], is sharded: each process of a group holds a part of one dimension.

    FSDP cuts the first dimension of a parameter: the rows of a stack, or the columns if its matrices are transposed.
    The last parts may be smaller, or empty.
    """

    group: dist.ProcessGroup
    dim: int  # 1: rows, 2: columns
    length: int  # of the dimension

    @classmethod
    def of(cls, p: torch.Tensor, dim: int) -> "MatrixShards | None":
        """Return how the matrices of a parameter are sharded; None if they are not."""
        if not isinstance(p, DTensor):
            return None
        return cls(p.device_mesh.get_group(p.device_mesh.ndim - 1), dim, p.shape[0])

    @property
    def part_size(self) -> int:
        return -(-self.length // self.group.size())

    @property
    def columns(self) -> slice:
        """The columns of this process's parts."""
        start = self.part_size * self.group.rank()
        return slice(None) if self.dim == 1 else slice(start, start + self.part_size)

    def to_full(self, parts: torch.Tensor) -> torch.Tensor:
        """Give each process its share of the matrices, gathered from all processes' parts. Zeros pad uneven parts."""
        parts = parts.transpose(1, self.dim)
        num_processes = self.group.size()
        padding = (0, 0, 0, self.part_size - parts.shape[1], 0, -len(parts) % num_processes)
        whole = self._exchange(F.pad(parts, padding)).unflatten(0, (num_processes, -1))
        return whole.transpose(0, 1).flatten(1, 2).transpose(1, self.dim)

    def to_shards(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Undo `to_full`. shape: of the parts."""
        parts = whole.transpose(1, self.dim).unflatten(1, (-1, self.part_size)).transpose(0, 1)
        parts = self._exchange(parts.flatten(0, 1)).transpose(1, self.dim)
        return parts[: shape[0], : shape[1], : shape[2]]

    def sum_columns(self, sums: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Add up [n, 1, columns of the parts] to [n, 1, num_columns]."""
        whole = sums.new_zeros(len(sums), 1, num_columns)
        whole[:, :, self.columns] = sums
        dist.all_reduce(whole, group=self.group)
        return whole

    def _exchange(self, matrices: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(matrices, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, matrices.contiguous(), group=self.group)
        return received


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


def even_out_neurons(
    updates: torch.Tensor, squares: torch.Tensor, shards: MatrixShards | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors that give every neuron updates of the same size over time, and preserve each matrix's norm.

    updates: fp32 [n, rows, columns]. Each column is a neuron, as `find_matrices` says. squares: fp32 [n, 1, columns],
    the running means of the neurons' mean squares. Returns the factors, shaped like squares, and the new means.
    shards: of updates and factors; the means are not sharded.
    """
    sums = torch.linalg.vector_norm(updates, dim=1, keepdim=True).square()
    num_rows = updates.shape[1]
    if shards is not None:
        sums = shards.sum_columns(sums, squares.shape[2])
        if shards.dim == 1:
            num_rows = shards.length
    squares = squares.lerp(sums / num_rows, 1 - NEURON_BETA)
    scales = squares.clamp(min=1e-10).rsqrt()
    norms = (sums * scales.square()).sum(dim=2, keepdim=True)
    scales = scales * (sums.sum(dim=2, keepdim=True) / norms.clamp(min=1e-10)).sqrt()
    return scales if shards is None else scales[:, :, shards.columns], squares


def find_matrices(model: nn.Module) -> dict[torch.Tensor, tuple[int, bool]]:
    """Return {weight: (number of matrices in it, whether their rows are neurons)} for the projections of the blocks.

    Neurons are the longer side, and the outputs of a square matrix: rows of a Linear, columns of a Conv1D. GPT-2's
    `c_attn` holds three matrices side by side, for queries, keys and values. Fused projections of other model types
    (such as phi3's and gpt_neox's) count as one. model: of Transformers, or a module that holds one.
    """
    model = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    matrices = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (Conv1D, nn.Linear)) and layer is not model.get_output_embeddings():
            count = 3 if isinstance(layer, Conv1D) and name.endswith(".c_attn") else 1
            rows, columns = layer.weight.shape[0], layer.weight.shape[1] // count
            if layer.weight.requires_grad:
                rows_are_neurons = rows > columns or (rows == columns and isinstance(layer, nn.Linear))
                matrices[layer.weight] = (count, rows_are_neurons)
    return matrices


def _copy_unless(found_inf: torch.Tensor, tensors: Views, before: torch.Tensor, after: torch.Tensor) -> None:
    """Copy `after` into the tensors, or `before` if found_inf is 1, even if `after` is NaN. Both are stacks."""
    copied = torch.where(found_inf > 0, before, after).unbind()
    torch._foreach_copy_(tensors, copied)  # pyright: ignore[reportPrivateImportUsage]  # no other


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
