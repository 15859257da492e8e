"""GPT-2's training loop with nothing around it: the first file to read, and to copy. It imports nothing of recipe/.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name openai-community/gpt2 --output_dir DIR
python scripts/bare_loop.py DIR

DIR is any packed dataset. scripts/run_ladder.py shows what each optimization is worth. recipe/train.py is the same
loop with several devices, checkpoints, evaluation, a log and publishing around it.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

N_LAYER, N_HEAD, N_EMBD = 4, 2, 128  # GPT-2 124M: 12, 12, 768
BLOCK_SIZE = 256  # tokens per row; 124M: 1024
MICRO_BATCH, GRAD_ACCUM = 8, 1  # rows per forward pass, forward passes per step; 124M: 64, 8
MAX_STEPS = 1200  # 124M: 19,073
WARMUP_STEPS = 50  # 124M: 715
PEAK_LR = 2e-3  # 124M: 6e-4
LOG_STEPS = 100
SEED = 1337


def learning_rate(step: int) -> float:
    """Rise linearly to the peak, then fall along a cosine to a tenth of it."""
    if step < WARMUP_STEPS:
        return PEAK_LR * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, MAX_STEPS - WARMUP_STEPS)
    return PEAK_LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def time_product(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of the fastest of several matrix products: no CPU's name says which type it prefers."""
    a = torch.ones(512, 512, dtype=dtype, device=device)
    seconds = []
    for _ in range(5):
        started_at = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started_at)
    return min(seconds)


def main() -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # on a CPU, huge pages for the logits: 1.3 times as fast
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    use_bf16 = device.type == "cuda"
    if not use_bf16:
        use_bf16 = time_product(device, torch.bfloat16) < 0.9 * time_product(device, torch.float32)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    metadata = json.loads((directory / "metadata.json").read_text())
    files = [
        np.memmap(directory / name, metadata["files"][name]["type"], "r", start, (count,))
        for name, start, count in metadata["splits"]["train"]["stretches"]
    ]
    counts = [(len(ids) - 1) // BLOCK_SIZE for ids in files]  # of rows; the rest of a file is not used
    file_of_row = np.repeat(np.arange(len(files)), counts)
    row_starts = np.concatenate([np.arange(count) * BLOCK_SIZE for count in counts])
    num_rows = len(row_starts)
    steps_per_epoch = num_rows // (MICRO_BATCH * GRAD_ACCUM)
    if steps_per_epoch == 0:
        sys.exit(f"{directory} has {num_rows} rows, but one step takes {MICRO_BATCH * GRAD_ACCUM}; prepare more text")

    # Stock "sdpa" builds an explicit causal mask, which rules out flash kernels. A name without a mask function gets
    # attention_mask=None and therefore is_causal=True (transformers#41856).
    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    model_config = GPT2Config(
        vocab_size=-(-metadata["vocab_size"] // 128) * 128,  # 50257 -> 50304, a size with fast matmul kernels
        n_positions=BLOCK_SIZE,
        n_layer=N_LAYER,
        n_head=N_HEAD,
        n_embd=N_EMBD,
        resid_pdrop=0.0,  # GPT2Config's default is 0.1
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=metadata["eos_token_id"],
        eos_token_id=metadata["eos_token_id"],
    )
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa_without_mask").to(device)

    padding = torch.zeros(model_config.vocab_size, device=device)
    padding[metadata["vocab_size"] :] = -math.inf  # no probability for tokens that do not exist

    def compute_loss(input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids, use_cache=False).logits + padding  # compiled: in eager fp32 they take gigabytes
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if device.type == "cuda":  # on a CPU, compiling takes longer than it saves in a run this short
        compute_loss = torch.compile(compute_loss, dynamic=False)
    matrices = {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=PEAK_LR, betas=(0.9, 0.95), fused=True)

    started_at = time.perf_counter()
    for step in range(MAX_STEPS):
        if step % steps_per_epoch == 0:
            order = torch.randperm(num_rows).numpy()
        step_loss = torch.zeros((), device=device)
        for micro_step in range(GRAD_ACCUM):
            first = (step % steps_per_epoch * GRAD_ACCUM + micro_step) * MICRO_BATCH
            chosen = order[first : first + MICRO_BATCH]
            rows = [files[file_of_row[i]][row_starts[i] : row_starts[i] + BLOCK_SIZE + 1] for i in chosen]
            batch = torch.from_numpy(np.stack(rows).astype(np.int64))
            if device.type == "cuda":
                batch = batch.pin_memory()
            batch = batch.to(device, non_blocking=True)  # from pinned memory, the host does not wait for the copy
            # A GPU without bf16 units would need fp16 and a GradScaler.
            with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16):
                loss = compute_loss(batch[:, :-1], batch[:, 1:]) / GRAD_ACCUM
            loss.backward()
            step_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_STEPS == 0:  # the only wait for the device
            loss = step_loss.item()
            seconds = time.perf_counter() - started_at
            tokens_per_second = LOG_STEPS * GRAD_ACCUM * MICRO_BATCH * BLOCK_SIZE / seconds
            print(f"step {step + 1:>6,}: loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", flush=True)
            started_at = time.perf_counter()


if __name__ == "__main__":
    main()
