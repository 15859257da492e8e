"""Time the parts of a GPT-2 step alone, forward and backward, at the shapes of a recipe.

python scripts/benchmarks/kernel_times.py --rows 64 --output_file kernels.json

It times attention with each kernel of sdpa, the loss with each way to mask the padding and without padding, the five
matrix products of a forward pass, GELU in both forms, and a copy. All use bf16; on a GPU, loss and GELU are compiled.
The file is complete after every measurement; a measurement that fails records why.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

from recipe.arguments import CommandLine
from recipe.benchmark.machine import current_device
from recipe.benchmark.measure import replace_file
from recipe.errors import run_main
from recipe.hardware.accelerator import persist_compile_cache
from recipe.model.attention import SDPA_WITHOUT_MASK
from recipe.model.build import SigmoidGELU
from recipe.model.loss import LanguageModelingLoss
from recipe.model.size import padded_vocab_size

ATTENTION = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def main() -> None:
    parser = CommandLine(description="Time the parts of a GPT-2 step alone.")
    parser.add_argument("--rows", type=int, default=64, help="sequences per forward pass")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--n_embd", type=int, default=768, help="width of the residual stream")
    parser.add_argument("--n_head", type=int, default=12, help="attention heads")
    parser.add_argument("--vocab_size", type=int, default=50257, help="vocabulary; padded to a multiple of 128")
    parser.add_argument("--output_file", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    persist_compile_cache()
    results: dict[str, dict] = {}
    for name, build in benchmarks(args, current_device()).items():
        try:
            function, work = build()
            function()  # compiles
            timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
            milliseconds = timer.blocked_autorange(min_run_time=0.5).median * 1e3
            rates = {unit: round(amount / milliseconds / 1e9, 4) for unit, amount in work.items()}
            results[name] = {"ms": round(milliseconds, 4), **rates}
        except Exception as error:  # no such kernel here, out of memory, no compiler: the others may run
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        torch.compiler.reset()
        replace_file(args.output_file, lambda path: path.write_text(json.dumps(results, indent=2) + "\n"))
        print(name, results[name], flush=True)


def benchmarks(args: argparse.Namespace, device: torch.device) -> dict[str, Callable]:
    """Return functions that prepare what to time and its work: FLOPs as "tflops", bytes as "tb_per_second"."""
    tokens, width = args.rows * args.block_size, args.n_embd
    padded = padded_vocab_size(args.vocab_size, 128)

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16().requires_grad_(grad)

    def compiled(module: nn.Module) -> nn.Module:
        if device.type == "cuda":
            module.compile(fullgraph=True, dynamic=False)
        return module

    def attention(kernel: SDPBackend):
        shape = (args.rows, args.n_head, args.block_size, width // args.n_head)
        q, k, v = (random(*shape, grad=True) for _ in range(3))
        gradient = random(*shape)

        def run() -> None:
            with sdpa_kernel(kernel):
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), gradient)

        # Two products forward and five backward (scores are recomputed); a causal kernel needs half of each.
        return run, {"tflops": 7 * tokens * args.block_size * width}

    def loss(index_mask: bool, has_padding: bool = True):
        config = GPT2Config(
            n_layer=0, n_embd=width, n_head=args.n_head, n_positions=args.block_size, vocab_size=padded
        )
        model = GPT2LMHeadModel._from_config(config, attn_implementation=SDPA_WITHOUT_MASK)
        module = LanguageModelingLoss(model, args.vocab_size if has_padding else padded, index_mask=index_mask)
        module = compiled(module.to(device))
        rows = torch.randint(args.vocab_size, (args.rows, args.block_size + 1), device=device)

        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                value = module(rows[:, :-1], rows[:, 1:])
            value.backward()
            module.zero_grad()

        return run, {"tflops": 6 * tokens * width * padded}

    def product(inputs: int, outputs: int):
        a, b = random(tokens, inputs), random(inputs, outputs)
        return lambda: torch.mm(a, b), {"tflops": 2 * tokens * inputs * outputs}

    def gelu(function: nn.Module):
        x, gradient = random(tokens, 4 * width, grad=True), random(tokens, 4 * width)
        function = compiled(function)
        # It reads x twice and the gradient, and writes the value and its gradient: 5 x 2 bytes.
        return lambda: torch.autograd.grad(function(x), x, gradient), {"tb_per_second": 10 * x.numel()}

    def copy():
        x = random(tokens, 4 * width)
        return x.clone, {"tb_per_second": 4 * x.numel()}

    return {
        **{name.lower(): partial(attention, SDPBackend.__members__[name]) for name in ATTENTION},
        "loss_index_mask": lambda: loss(index_mask=True),
        "loss_bias_mask": lambda: loss(index_mask=False),
        "loss_without_padding": lambda: loss(index_mask=False, has_padding=False),
        "matmul_qkv": lambda: product(width, 3 * width),
        "matmul_attention_out": lambda: product(width, width),
        "matmul_mlp_in": lambda: product(width, 4 * width),
        "matmul_mlp_out": lambda: product(4 * width, width),
        "matmul_head": lambda: product(width, padded),
        "gelu_tanh": lambda: gelu(ACT2FN["gelu_new"]),
        "gelu_sigmoid": lambda: gelu(SigmoidGELU()),
        "copy": copy,
    }


if __name__ == "__main__":
    run_main(main)
