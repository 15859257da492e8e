"""Compare the memory estimate with the peak memory of short runs, and write each pair.

python scripts/benchmarks/memory_estimate.py --output_file scripts/benchmarks/memory_estimate_cpu.json

Each run is recipe/train.py in a fresh process for `STEPS` steps, without evaluation. The peak is the largest resident
memory of the process on a CPU, and of PyTorch's allocator on a GPU, where the estimate is compared without the CUDA
context. The vocabulary is padded to GPT-2's, so that a small tokenizer, which trains quickly, gives the real logits.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recipe.arguments import CommandLine
from recipe.benchmark.measure import (
    TRAIN,
    end_program,
    end_programs,
    start_program,
    to_arguments,
    utc_now,
    why_it_ended,
)
from recipe.command_line import load_config
from recipe.data.prepare import open_dataset_for
from recipe.environment import describe_environment
from recipe.errors import run_main
from recipe.hardware.memory import Setting, estimate_parts
from recipe.model.build import build_model_config

STEPS = 3  # the first has no moments yet, and the second accumulates into existing ones
MOST_SECONDS = 600
SIZES = {  # n_layer, n_head, n_embd
    "1M": (4, 2, 128),
    "30M": (6, 6, 384),
    "124M": (12, 12, 768),
}
DATA = {"dataset_name": "python_standard_library", "tokenizer_vocab_size": 2048}
GPT2_VOCAB_SIZE = 50304
BASE = {
    "size": "30M", "vocab_size": GPT2_VOCAB_SIZE, "block_size": 512, "per_device_train_batch_size": 4,
    "global_batch_size": 4, "mixed_precision": "bf16", "dynamo_backend": "inductor", "attn_implementation": "sdpa",
    "activation_checkpointing": "false", "loss_chunks": 1, "optim": "adamw_torch_fused", "bf16_residual": "false",
}  # fmt: skip
EAGER, FP32 = {"dynamo_backend": "no"}, {"mixed_precision": "no"}
PLAIN, CHECKPOINTED = {"attn_implementation": "eager"}, {"activation_checkpointing": "true"}
CHUNKS = {"loss_chunks": 8}
ACCUMULATES, EIGHT_BIT = {"per_device_train_batch_size": 1}, {"optim": "adamw_bnb_8bit"}
LARGE = {"size": "124M", "block_size": 1024, "global_batch_size": 2, "per_device_train_batch_size": 2}
RESIDUAL = {"bf16_residual": "true"}
WIDE = {"per_device_train_batch_size": 8, "global_batch_size": 8}
ONE_M = {"size": "1M", "vocab_size": 2048, "block_size": 256, "per_device_train_batch_size": 8, "global_batch_size": 8}
GRID = [
    LARGE | EAGER, LARGE, CHUNKS, {}, FP32, EAGER, ONE_M, ONE_M | EAGER, ONE_M | EAGER | PLAIN,
    WIDE | CHUNKS, EAGER | ACCUMULATES, EAGER | CHECKPOINTED, EAGER | CHUNKS, ACCUMULATES, CHECKPOINTED,
    PLAIN, EAGER | PLAIN, EAGER | FP32, LARGE | ACCUMULATES, LARGE | EAGER | ACCUMULATES, EAGER | EIGHT_BIT,
    LARGE | CHECKPOINTED | CHUNKS, LARGE | EAGER | CHECKPOINTED | CHUNKS, RESIDUAL, WIDE, EAGER | WIDE,
    CHECKPOINTED | CHUNKS, EAGER | CHECKPOINTED | CHUNKS, EAGER | ACCUMULATES | CHECKPOINTED | CHUNKS, FP32 | PLAIN,
    EAGER | FP32 | PLAIN, EAGER | {"optim": "adamw_torch"}, EIGHT_BIT, LARGE | EAGER | FP32, LARGE | EAGER | EIGHT_BIT,
]  # fmt: skip


def options_of(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell's options of recipe/train.py."""
    cell = BASE | cell
    layers, heads, width = SIZES[cell.pop("size")]
    shape = f"n_layer={layers},n_head={heads},n_embd={width}"
    return {**DATA, "config_overrides": shape, "pad_vocab_to_multiple_of": cell.pop("vocab_size"), **cell}


def estimate(options: dict[str, Any], device_type: str) -> dict[str, int]:
    """Return the estimate by part for the options of a run."""
    config = load_config(to_arguments(options))[0]
    model_config = build_model_config(config, config.pad_vocab_to_multiple_of, 0)
    setting = Setting(
        device_type, config.mixed_precision, config.dynamo_backend == "inductor", config.bf16_residual == "true"
    )
    chosen = config.activation_checkpointing == "true", config.loss_chunks, config.optim
    size = config.per_device_train_batch_size
    return estimate_parts(config, model_config, setting, size, *chosen)


def measure_peak(options: dict[str, Any], work: Path) -> int | str:
    """Return the peak bytes of a run after `STEPS` steps, or why it failed."""
    dataset = open_dataset_for(load_config(to_arguments(options))[0]).directory  # not in the measured process
    options = {key: value for key, value in options.items() if key not in DATA} | {"dataset_dir": dataset}
    run, log = work / "run", work / "run.log"
    shutil.rmtree(run, ignore_errors=True)
    fixed = {"output_dir": run, "max_steps": 10**5, "logging_steps": 1, "eval_on_start": False, "eval_steps": 0}
    arguments = to_arguments({**options, **fixed, "save_steps": 0})
    with open(log, "wb") as file:
        process = start_program([sys.executable, str(TRAIN), *arguments], file)
    deadline = time.monotonic() + MOST_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            metrics = run / "metrics.jsonl"
            lines = metrics.read_bytes().rpartition(b"\n")[0].splitlines() if metrics.is_file() else []
            for event in map(json.loads, lines):
                if event["event"] == "train" and event["step"] >= STEPS:
                    return event["peak_memory_bytes"]
            time.sleep(0.2)
        return why_it_ended(log.read_text(errors="replace"))
    finally:
        end_program(process)


def main() -> None:
    parser = CommandLine(description="Compare the memory estimate with measured peaks.")
    parser.add_argument("--output_file", type=Path, help="JSON to write; complete after each run")
    parser.add_argument("--only", default="", help="measure only the runs whose description contains this text")
    parser.add_argument("--measured", type=Path, help="result file whose peaks to reuse")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.measured.read_text())["results"] if arguments.measured else []
    peaks = {json.dumps(run["options"]): run["peak_memory_bytes"] for run in earlier if "error" in run}
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    cells = [(" ".join(f"{key}={value}" for key, value in cell.items()) or "base", cell) for cell in GRID]
    cells = [(name, cell) for name, cell in cells if arguments.only in name]
    results, os.environ["PYTHONUNBUFFERED"] = [], "1"
    print(f"{'measured':>9} {'estimated':>9}  error  run (what differs from {' '.join(map(str, BASE.values()))})")
    with tempfile.TemporaryDirectory() as folder:
        for name, cell in cells:
            options = options_of(cell)
            parts = estimate(options, device_type)
            peak = peaks.get(json.dumps(options)) or measure_peak(options, Path(folder))
            entry = {"run": name, "options": options, "estimate": parts}
            if isinstance(peak, str):
                print(f"{'failed':>9}  {name}: {peak}", flush=True)
                results.append(entry | {"failed": peak})
                continue
            total = sum(parts.values()) - (parts["process"] if device_type == "cuda" else 0)
            error = total / peak - 1
            print(f"{peak / 1e9:9.2f} {total / 1e9:9.2f} {error:+6.1%}  {name}", flush=True)
            results.append(entry | {"estimated_bytes": total, "peak_memory_bytes": peak, "error": round(error, 4)})
            if arguments.output_file:
                write(results, arguments.output_file)
    print(f"largest error: {max((abs(r.get('error', 0)) for r in results), default=0):.1%}")


def write(results: list[dict[str, Any]], path: Path) -> None:
    """Write what has been measured so far."""
    content = {
        "command": " ".join(["python", *sys.argv]),
        "finished_at": utc_now(),
        "environment": describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "largest_error": max(abs(result["error"]) for result in results if "error" in result),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    try:
        run_main(main)
    finally:
        end_programs()
