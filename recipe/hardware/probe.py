"""Time what a run is about to do, in milliseconds: matrix products and attention of its own shapes, on its device.

No flag of a processor tells whether it multiplies bf16 faster than fp32: of three with avx512_bf16, one is half as
fast in bf16, one twice and one several times. The fastest of several rounds counts, so a busy neighbor changes little.
The random state stays as it is.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig

from recipe.hardware.devices import DTYPES
from recipe.model.size import count_inner

SIDE_SECONDS = 0.002  # rows and columns double until a product takes this long, so none takes more than 10 ms
ROUNDS = (3, 12)  # at least and at most; in between, until the time is up:
PRODUCT_SECONDS = 0.2
ATTENTION_SECONDS = 0.1
MOST_ROWS = 4096  # of a product
LONGEST_PLAIN = 2048  # tokens: a head's scores are 16 MB then, and the time grows with the square
HOPELESS = 4.0  # a type in which a small product takes this many times as long is not measured further


@dataclass(frozen=True)
class Measured:
    """What was timed on a device. num_threads: on a CPU, the fastest number; the rest was timed with it."""

    flops_per_second: dict[str, float]  # of the model's products, forward and backward, by mixed_precision
    attention_seconds: dict[str, float]  # of a few heads, forward and backward, by attn_implementation; may be empty
    num_threads: int


def measure_rates(
    device: torch.device,
    model_config: PreTrainedConfig,
    block_size: int,
    precisions: Sequence[str] = ("no", "bf16"),
    thread_counts: Sequence[int] = (),
) -> Measured:
    """Time the products of a model, with each number of threads, and both kinds of attention on a CPU.

    precisions: values of mixed_precision to compare. thread_counts: numbers to compare; empty: the current one.
    """
    before = torch.get_num_threads()
    try:
        rates = {}
        for count in thread_counts or [before]:
            torch.set_num_threads(count)
            rates[count] = time_products(device, model_config, precisions)
        num_threads = max(rates, key=lambda count: max(rates[count].values()))
        torch.set_num_threads(num_threads)
        fastest = max(rates[num_threads], key=rates[num_threads].get)
        seconds = time_attention(model_config, block_size, DTYPES[fastest]) if device.type == "cpu" else {}
    finally:
        torch.set_num_threads(before)
    return Measured(rates[num_threads], seconds, num_threads)


def time_products(device: torch.device, model_config: PreTrainedConfig, precisions: Sequence[str]) -> dict[str, float]:
    """Return the FLOPs per second of a model's products, by precision: of their forward and both backward ones.

    Each matrix is cut to as many columns as there are rows, because whole matrices of a large model take too long.
    """
    width = model_config.hidden_size
    inner = count_inner(model_config)
    num_layers = model_config.num_hidden_layers
    flops = Counter()  # of a token, by (width, columns)
    for shape in ((width, 4 * width), (width, inner), (inner, width)):  # attention's four matrices, the MLP's two
        flops[shape] += num_layers * math.prod(shape)
    flops[width, model_config.vocab_size] += width * model_config.vocab_size

    small = {name: best_of(3, device, multiply(device, name, 64, 256, 256)[0]) for name in precisions}
    names = [name for name in precisions if small[name] < HOPELESS * min(small.values())]
    side = 64
    widest = max(width, inner)
    fastest = min(names, key=small.__getitem__)
    while side < MOST_ROWS and best_of(2, device, multiply(device, fastest, side, widest, side)[0]) < SIDE_SECONDS:
        side *= 2
    cut = {shape: (side, shape[0], min(shape[1], side)) for shape in flops}
    products = {
        (name, sides, number): product
        for sides in set(cut.values())
        for name in names
        for number, product in enumerate(multiply(device, name, *sides))
    }
    seconds = best_in_turn(products, device, PRODUCT_SECONDS)

    rates = {}
    for name in names:
        per_flop = {
            sides: sum(seconds[name, sides, number] for number in range(3)) / (6 * math.prod(sides))
            for sides in set(cut.values())
        }
        rates[name] = flops.total() / sum(flops[shape] * per_flop[cut[shape]] for shape in flops)
    return {name: rates.get(name, rates[fastest] * small[fastest] / small[name]) for name in precisions}


def multiply(device: torch.device, precision: str, rows: int, width: int, columns: int) -> list[Callable]:
    """Return a linear layer's three products as functions: of its input [rows, width], and of both gradients."""
    inputs, weight, grad = (
        torch.full(shape, 0.5, dtype=DTYPES[precision], device=device)
        for shape in ((rows, width), (width, columns), (rows, columns))
    )
    return [lambda: inputs @ weight, lambda: grad @ weight.t(), lambda: inputs.t() @ grad]


def time_attention(model_config: PreTrainedConfig, block_size: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds of causal attention on a CPU, forward and backward, one head per thread.

    {} for rows so long that plain attention, which keeps block_size^2 values per head, is not an option.
    """
    if block_size > LONGEST_PLAIN:
        return {}
    head_dim = model_config.hidden_size // model_config.num_attention_heads
    heads = min(model_config.num_attention_heads, torch.get_num_threads())
    parts = [torch.full((1, heads, block_size, head_dim), 0.5, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.full((block_size, block_size), torch.finfo(dtype).min, dtype=dtype).triu(1)

    def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * head_dim**-0.5 + mask
        return scores.float().softmax(-1).to(dtype) @ value

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward_and_backward(attend: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(attend(*parts), parts, torch.full_like(parts[0], 0.5))

    kinds = {attend.__name__: partial(forward_and_backward, attend) for attend in (eager, sdpa)}
    return best_in_turn(kinds, parts[0].device, ATTENTION_SECONDS)


def best_in_turn(functions: dict[Any, Callable], device: torch.device, most_seconds: float) -> dict[Any, float]:
    """Return the seconds of each function's fastest call. They take turns, so busy neighbors slow all alike."""
    seconds = dict.fromkeys(functions, math.inf)
    started_at = time.perf_counter()
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and time.perf_counter() - started_at > most_seconds:
            break
        for key, function in functions.items():
            seconds[key] = min(seconds[key], best_of(1, device, function))
    return seconds


def best_of(rounds: int, device: torch.device, function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(rounds):
        started_at = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)
