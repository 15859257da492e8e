"""A run on an H100 that is not there, with the code that inductor generates for it: `pytest -m dry_run -s`.

What it takes of memory, and what its kernels read, write and compute. The tests take half an hour and write their
tables to scripts/benchmarks/. Nothing in them is measured: the times are those of ideal kernels, without launches.
"""

import importlib.util
import json
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from recipe.command_line import load_config
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import read_tokenizer
from recipe.environment import describe_environment
from recipe.hardware.memory import PROCESS_BYTES, MemoryPlan, estimate_bytes
from recipe.model.build import build_model_config
from recipe.model.size import count_block_matrices, count_flops_per_token, count_head, count_parameters

NO_TRITON = importlib.util.find_spec("triton") is None
pytestmark = [
    pytest.mark.dry_run,
    pytest.mark.skipif(torch.version.cuda is None or NO_TRITON, reason="needs a build of torch with CUDA, and Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where `pytest -m gpu` measures"),
]
RESULTS = ROOT / "scripts" / "benchmarks"
VOCABULARY, LENGTH = 50304, 1024


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory, jsonl_file, tokenizer_dir) -> Path:
    """A dataset with rows of 1,024 tokens."""
    directory, tokenizer = tmp_path_factory.mktemp("rows") / "dataset", read_tokenizer(str(tokenizer_dir))
    prepare_dataset(TextSource(train_files=(str(jsonl_file),)), directory, tokenizer)
    return directory


@pytest.fixture
def rehearse(absent_gpu, rows_dir, tmp_path) -> Callable[..., tuple]:
    """Train for two steps of two micro-batches, with a trial step before them and an evaluation after them.

    Returns what was found, the config and the model's config. Each run has an interpreter of its own.
    """

    def run(recipe: str, rows: int, *options: object) -> tuple:
        argv = ["--config", recipe, "--dataset_dir", rows_dir, "--output_dir", tmp_path / "run", "--max_steps", 2]
        argv += ["--per_device_train_batch_size", rows, "--global_batch_size", 2 * rows, "--warmup_steps", 0]
        argv += ["--pad_vocab_to_multiple_of", VOCABULARY, "--mixed_precision", "bf16", "--eval_steps", 0]
        argv = [str(word) for word in (*argv, "--max_eval_samples", rows, "--save_steps", 0, *options)]
        with absent_gpu() as process:
            found = json.loads(process.communicate(json.dumps({"argv": argv}) + "\n")[0])
        shutil.rmtree(tmp_path / "run")  # the model
        assert found["failed"] is None, found["failed"]
        config = load_config(argv)[0]
        return found, config, build_model_config(config, VOCABULARY, 0)

    return run


def write_entry(name: str, what: str, key: str, entry: dict) -> None:
    """Replace an entry of a table, and what the table says about its origin."""
    path = RESULTS / name
    entries = json.loads(path.read_text())["entries"] if path.is_file() else {}
    origin = {"command": "pytest -m dry_run", "date": time.strftime("%Y-%m-%d")}
    origin["environment"] = describe_environment(torch.device("cpu"))
    entries = dict(sorted({**entries, key: entry}.items()))
    path.write_text(json.dumps({"what": what, **origin, "entries": entries}, indent=2) + "\n")


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("chunks", [1, 8], ids=["", "chunks"])
@pytest.mark.parametrize(("size", "rows"), [("124m", 32), ("355m", 16), ("774m", 8), ("1558m", 4)])
@pytest.mark.parametrize(("backend", "tolerance"), [("no", 0.02), ("inductor", 0.06)])
def test_the_memory_of_a_run_is_the_estimate(rehearse, size, rows, checkpointing, chunks, backend, tolerance):
    """For each size of GPT-2, and each option that saves memory."""
    options = ["--dynamo_backend", backend, "--activation_checkpointing", checkpointing, "--loss_chunks", chunks]
    found, config, model_config = rehearse(f"gpt2_{size}", rows, *options)
    plan = MemoryPlan(rows, checkpointing, chunks)
    estimate = estimate_bytes(plan, config, model_config, "cuda", 1) - PROCESS_BYTES
    error = estimate / found["peak_bytes"] - 1
    compiled = "compiled" if backend == "inductor" else "eager"
    saving = " and ".join(["activation checkpointing"] * checkpointing + ["8 loss chunks"] * (chunks > 1))
    key = ", ".join(filter(None, (f"gpt2_{size}", f"{rows} rows", compiled, saving)))
    entry = {"dry_run_gb": round(found["peak_bytes"] / 1e9, 2), "estimated_gb": round(estimate / 1e9, 2)}
    entry["error"] = round(error, 3)
    what = "Peak of the tensors of a run on an H100 that is not there, and the estimate; not measured"
    write_entry("memory_gpu.json", what, key, entry)
    print(f"\n{key}: {entry}")
    assert abs(error) < tolerance


# ------------------------------------------------------------------ kernels


TOKENS_PER_STEP = 524_288
PEAK_FLOPS, REACHED = 989e12, 0.75  # data sheet, bf16; the share that cuBLAS and flash attention are taken to reach
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second, SXM
ATTENTION = {"_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_flash_attention_backward": 10}
# The first pattern found in a kernel's name, which lists its operators, names its group.
MICRO_BATCH = {
    "flash_attention": "attention",
    "logsumexp|_exp_": "cross-entropy",
    "embedding|add_arange|_to_copy_add_\\d+$": "embeddings",
    "native_layer_norm|^sum$": "norms with residuals",  # sum: over partial sums of the gradients of weights and biases
    "tanh": "GELU",
    "_sum_": "bias gradients",
    "_cat_": "gradient of qkv",
    "_to_copy_view": "casts of the residual's gradient",
    "_to_copy": "casts of weights and their gradients",
}
STEP = {
    "^add_$": "gradient accumulation",
    "linalg_vector_norm|^mul_$|_foreach_norm|_foreach_mul_": "clipping",
    "adamw": "optimizer",
}
OTHER = "other"


def group_of(kernel: str, shapes: list[list[int]]) -> str:
    if kernel in ("mm", "addmm"):
        return "matmul of the logits" if any(VOCABULARY in shape for shape in shapes) else "matmuls of the blocks"
    return next((group for pattern, group in {**MICRO_BATCH, **STEP}.items() if re.search(pattern, kernel)), OTHER)


def count_flops(kernel: str, shapes: list[list[int]]) -> int:
    """Count a matmul, or causal attention: two products forward, five backward, of half a square each."""
    if kernel in ("mm", "addmm"):
        (rows, inner), (_, columns) = shapes[-2:]
        return 2 * rows * inner * columns
    if kernel in ATTENTION:
        batch, heads, length, head_dim = shapes[0]
        return ATTENTION[kernel] * batch * heads * length * length * head_dim // 2
    return 0


def profile(calls: list, rows: int) -> dict[str, dict]:
    """Add up by group what a step of TOKENS_PER_STEP launches, from the calls of one with two micro-batches."""
    num_micro_batches, groups = TOKENS_PER_STEP // (rows * LENGTH), {}
    for _, kernel, read, written, shapes in calls:
        group, flops = group_of(kernel, shapes), count_flops(kernel, shapes)
        times = 1.0
        if group == "gradient accumulation":  # not in the first micro-batch
            times = num_micro_batches - 1
        elif group not in {*STEP.values(), OTHER} or kernel.startswith("triton"):
            times = num_micro_batches / 2
        total = groups.setdefault(group, defaultdict(float))
        total["kernels"] += times
        total["bytes"] += times * (read + written)
        total["flops"] += times * flops
        for gpu, bandwidth in BANDWIDTHS.items():
            total[f"ms_{gpu}"] += times * 1e3 * max((read + written) / bandwidth, flops / (REACHED * PEAK_FLOPS))
    return groups


@pytest.mark.parametrize(
    ("rows", "options"), [(16, []), (32, []), (64, []), (64, ["--loss_chunks", 8]), (64, ["--bf16_residual"])]
)
def test_the_profile_of_a_compiled_step(rehearse, rows, options):
    """Its FLOPs are those of the formulas, all large kernels have a group, and fp32 logits are never written."""
    found, config, model = rehearse("gpt2_124m", rows, "--dynamo_backend", "inductor", *options)
    calls = [call for call in found["calls"] if call[0] == 1]  # of the second step
    groups, total = profile(calls, rows), defaultdict(float)
    for numbers in groups.values():
        for key, value in numbers.items():
            total[key] += value
    speeds = {gpu: round(TOKENS_PER_STEP / total[f"ms_{gpu}"] * 1e3) for gpu in BANDWIDTHS}
    flops_per_token = count_flops_per_token(model, count_parameters(model), LENGTH)
    rounded = {name: {key: round(value, 3) for key, value in part.items()} for name, part in groups.items()}
    mfu = {gpu: round(speed * flops_per_token / PEAK_FLOPS, 3) for gpu, speed in speeds.items()}
    key = " ".join(map(str, (rows, "rows", *options)))
    what = "GPT-2 124M, compiled: what a step of 524,288 tokens launches, reads, writes and computes; not measured"
    write_entry("profile_gpu.json", what, key, {"tokens_per_second": speeds, "mfu": mfu, "step": rounded})

    matrices = model.n_layer * count_block_matrices(model) + count_head(model)
    head_products = 4 if "--loss_chunks" in options else 3  # chunks compute the logits twice
    products = groups["matmuls of the blocks"]["flops"] + groups["matmul of the logits"]["flops"]
    expected = 6 * matrices + 2 * (head_products - 3) * count_head(model)
    assert products == pytest.approx(expected * TOKENS_PER_STEP, rel=0.01)
    # The recipe's count, 12 L d T per token, is of whole squares, and of four products backward.
    assert groups["attention"]["flops"] == 7 * model.n_layer * model.n_embd * LENGTH * TOKENS_PER_STEP
    assert groups[OTHER]["bytes"] < 0.01 * total["bytes"]
    assert max(written for _, _, _, written, _ in calls) < rows * LENGTH * VOCABULARY * 4
