"""A step on an H100 that is not there, with the code that inductor generates for it: `pytest -m dry_run`.

The tests take half an hour and write their tables to scripts/benchmarks/. No number in them is measured on a GPU.
"""

import importlib.util
import json
import time

import pytest
import torch
from conftest import ROOT

from recipe.command_line import load_config
from recipe.data.prepare import prepare_dataset
from recipe.data.source import TextSource
from recipe.data.tokenizer import load_tokenizer
from recipe.environment import describe_environment
from recipe.hardware.memory import PROCESS_BYTES, MemoryPlan, estimate_bytes
from recipe.model.build import build_model_config

NO_TRITON = importlib.util.find_spec("triton") is None
pytestmark = [
    pytest.mark.dry_run,
    pytest.mark.skipif(torch.version.cuda is None or NO_TRITON, reason="needs a build of torch with CUDA, and Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where `pytest -m gpu` measures"),
]
MEMORY = ROOT / "scripts" / "benchmarks" / "memory_gpu.json"
ROWS = {"124m": 32, "355m": 16, "774m": 8, "1558m": 4}  # of 1,024 tokens, per forward pass
PADDED = 50304


@pytest.fixture(scope="module")
def rows(tmp_path_factory, jsonl_file, tokenizer_dir):
    """Rows of 1,024 tokens."""
    directory, tokenizer = tmp_path_factory.mktemp("rows") / "dataset", load_tokenizer(str(tokenizer_dir))
    prepare_dataset(TextSource(train_files=(str(jsonl_file),)), directory, 1024, tokenizer)
    return directory


def write_entry(path, about, key, entry):
    """Replace an entry of a table, and what the table says about its versions."""
    table = json.loads(path.read_text()) if path.is_file() else {"entries": {}}
    table = {"what": about, "command": "pytest -m dry_run", "date": time.strftime("%Y-%m-%d"), **table}
    table["environment"] = describe_environment(torch.device("cpu"))
    table["entries"][key] = entry
    path.write_text(json.dumps(table, indent=2) + "\n")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("chunks", [1, 8], ids=["", "chunks"])
@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize(("backend", "tolerance"), [("no", 0.06), ("inductor", 0.10)])
def test_the_memory_of_a_run_is_the_estimate(
    absent_gpu, rows, tmp_path, size, checkpointing, chunks, backend, tolerance
):
    """Two steps of two micro-batches, a trial step before them and an evaluation after them."""
    recipe, num_rows = f"gpt2_{size}", ROWS[size]
    options = [
        "--config",
        recipe,
        "--dataset_dir",
        str(rows),
        "--dynamo_backend",
        backend,
        "--mixed_precision",
        "bf16",
    ]
    options += ["--activation_checkpointing", str(checkpointing).lower(), "--loss_chunks", str(chunks)]
    options += ["--per_device_train_batch_size", str(num_rows), "--global_batch_size", str(2 * num_rows)]
    options += ["--pad_vocab_to_multiple_of", str(PADDED), "--max_steps", "2", "--warmup_steps", "0"]
    options += ["--eval_steps", "0", "--max_eval_samples", str(num_rows), "--output_dir", str(tmp_path / "run")]
    with absent_gpu() as process:
        found = json.loads(process.communicate(json.dumps({"argv": options}) + "\n")[0])
    assert found["failed"] is None
    config = load_config(options)[0]
    plan, model_config = MemoryPlan(num_rows, checkpointing, chunks), build_model_config(config, PADDED, 0)
    estimate = estimate_bytes(plan, config, model_config, "cuda", 1) - PROCESS_BYTES
    error = estimate / found["peak_bytes"] - 1
    saving = " and ".join(["activation checkpointing"] * checkpointing + ["8 loss chunks"] * (chunks > 1))
    key = f"{recipe}, {num_rows} rows, {'compiled' if backend == 'inductor' else 'eager'}, {saving or 'nothing saved'}"
    entry = {"dry_run_gb": round(found["peak_bytes"] / 1e9, 2), "estimated_gb": round(estimate / 1e9, 2)}
    about = "Peak of the tensors of a run on an H100 that is not there, and the estimate; not measured"
    write_entry(MEMORY, about, key, {**entry, "error": round(error, 3)})
    print(f"{key}: {entry}, {error:+.1%}")
    assert abs(error) < tolerance
