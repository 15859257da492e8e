"""The training step with nothing around it: forward, backward, clipping and AdamW on one batch, in a plain loop.

python scripts/bare_loop.py --config demo

Accepts the options of recipe/train.py and prints the time of every 4 steps. Whatever recipe/train.py takes on top of
it is the cost of the program around the step.
"""

from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.hardware.host_memory import use_huge_pages

if __name__ == "__main__":  # before torch is imported, as in recipe/train.py
    use_huge_pages(run_main(load_config)[0].huge_pages)

import math
import time
from pathlib import Path

import torch

from recipe.benchmark.measure import LAP
from recipe.data.prepare import open_dataset_for
from recipe.hardware.accelerator import build_accelerator, build_module
from recipe.hardware.micro_batch import micro_batch_candidates
from recipe.hardware.processes import start_processes
from recipe.model.build import build_model_config
from recipe.optim.optimizers import build_optimizer


def main() -> None:
    config, _ = load_config()
    start_processes()
    accelerator, precision = build_accelerator(config, Path("."))
    device = accelerator.device
    if precision.value == "fp16":
        raise UserError("the bare loop has no gradient scaler; pass --mixed_precision bf16 or no")
    vocab_size = open_dataset_for(config).vocab_size
    module, _ = build_module(config, build_model_config(config, vocab_size, 0), vocab_size, device, precision)
    module.to(device)
    optimizer = build_optimizer(config, module, precision.value)
    micro_batch_size = micro_batch_candidates(config, 1, device)[0]
    rows = torch.randint(vocab_size, (micro_batch_size, config.block_size + 1), device=device)
    input_ids, targets = rows[:, :-1], rows[:, 1:]
    num_micro_batches = config.global_batch_size // micro_batch_size
    started_at = time.perf_counter()
    for step in range(1, config.max_steps + 1):
        for _ in range(num_micro_batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision.value == "bf16"):
                loss = module(input_ids, targets)
            (loss / num_micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step % LAP == 0:
            if device.type != "cpu":
                torch.accelerator.synchronize()
            now = time.perf_counter()
            print(f"steps to {step}: {(now - started_at) * 1e3:.3f} ms", flush=True)
            started_at = now


if __name__ == "__main__":
    run_main(main)
