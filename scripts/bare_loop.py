"""The training step with nothing around it: forward, backward, clipping and AdamW on one batch, in a plain loop.

python scripts/bare_loop.py --config demo

Takes the options of recipe/train.py and prints the time of every 4 steps; what recipe/train.py takes more is the
program around them.
"""

from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.hardware.host_memory import use_huge_pages

if __name__ == "__main__":  # before torch is imported, as in recipe/train.py
    use_huge_pages(run_main(load_config)[0].huge_pages)

import math
import time

import torch
from accelerate import PartialState

from recipe.benchmark.measure import LAP
from recipe.data.prepare import open_dataset_for
from recipe.hardware.accelerator import compile_module
from recipe.hardware.choices import (
    choose_attention,
    choose_dynamo_backend,
    choose_index_mask,
    choose_mixed_precision,
    choose_residual,
    choose_sigmoid_gelu,
)
from recipe.hardware.memory import micro_batch_candidates
from recipe.hardware.processes import use_all_cores
from recipe.model.build import build_model, build_model_config, use_sigmoid_gelu
from recipe.model.loss import LanguageModelingLoss
from recipe.optim.optimizers import build_optimizer


def main() -> None:
    config, _ = load_config()
    state = PartialState()
    device = state.device
    use_all_cores(state)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    precision = choose_mixed_precision(config, device)
    if precision.value == "fp16":
        raise UserError("the bare loop has no gradient scaler: --mixed_precision bf16 or no")
    vocab_size = open_dataset_for(config).vocab_size
    model_config = build_model_config(config, vocab_size, 0)
    residual, dynamo = choose_residual(config, device, precision), choose_dynamo_backend(config, device, 0)
    model = build_model(config, model_config, choose_attention(config, device).value, residual.on)
    if choose_sigmoid_gelu(config, model_config, device, precision, dynamo).on:
        use_sigmoid_gelu(model)
    module = LanguageModelingLoss(
        model,
        vocab_size,
        config.label_smoothing_factor,
        config.loss_chunks,
        config.loss_in_graph,
        choose_index_mask(config, device, dynamo).on,
    ).to(device)
    compile_module(module if config.loss_in_graph else model, dynamo.value, config.dynamo_mode)
    optimizer = build_optimizer(config, module)
    micro_batch = micro_batch_candidates(config, 1, device)[0]
    rows = torch.randint(vocab_size, (micro_batch, config.block_size + 1), device=device)
    input_ids, targets = rows[:, :-1], rows[:, 1:]
    accumulation_steps = config.global_batch_size // micro_batch
    started_at = time.perf_counter()
    for step in range(1, config.max_steps + 1):
        for _ in range(accumulation_steps):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision.value == "bf16"):
                loss = module(input_ids, targets)
            (loss / accumulation_steps).backward()
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
