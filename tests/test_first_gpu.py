"""The ten minutes on a GPU, rehearsed on a CPU with a tiny model and dataset."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from conftest import BLOCK_SIZE, ROOT, load_program, sigterm_when

from recipe.benchmark.machine import Machine
from recipe.errors import UserError

PROGRAM = ROOT / "scripts" / "benchmarks" / "first_gpu.py"


@pytest.fixture(scope="module")
def arguments(dataset_dir, tmp_path_factory):
    """A tiny recipe, and a nanoGPT that fails."""
    folder = tmp_path_factory.mktemp("first_gpu")
    (folder / "tiny.yaml").write_text(
        f"dataset_dir: {dataset_dir}\nblock_size: {BLOCK_SIZE}\nglobal_batch_size: 4\n"
        "config_overrides: {n_layer: 2, n_head: 2, n_embd: 32}\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
        "dynamo_backend: 'no'\n"
    )
    (folder / "nanogpt").mkdir()
    (folder / "nanogpt" / "train.py").write_text("raise ValueError('this nanoGPT fails')\n")
    return ["--dataset_dir", dataset_dir, "--config", folder / "tiny.yaml", "--nanogpt", folder / "nanogpt", "--rows",
            4, "--steps", 4]  # fmt: skip


def start(arguments, folder) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments), "--output_dir", str(folder / "out")],
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(folder) -> dict[str, dict]:
    """By name, in the order of their files."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "out").glob("*.json"))]
    return {entry["name"]: entry for entry in found}


@pytest.mark.slow
def test_the_stages(arguments, tmp_path):
    """The rehearsal of all kinds of stages: each leaves its result; nanoGPT fails, and the stages after it run."""
    names = ["machine", "warm", "gpu_tests", "ours", "nanogpt", "ours_again", "kernels", "real"]
    process = start([*arguments, "--stages", ",".join(reversed(names))], tmp_path)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    found = results(tmp_path)
    assert list(found) == names
    starts = [entry["started_at"] for entry in found.values()]
    assert starts == sorted(starts)
    for name, entry in found.items():
        fails = name.startswith("nanogpt") or name == "warm"
        assert entry["status"] == ("failed" if fails else "done"), (name, entry["reason"])
        assert entry["environment"]["torch"] == torch.__version__ and entry["environment"]["device"]
        assert "first_gpu.py --dataset_dir" in entry["command"] and re.match(r"20\d\d-", entry["started_at"])
    assert found["nanogpt"]["reason"] == "ValueError: this nanoGPT fails"
    assert found["warm"]["reason"] == "not warm: nanogpt, nanogpt_default"
    assert found["warm"]["result"]["ours_small"]["step_ms"] > 0
    assert found["machine"]["result"]["machine"]["matmul_tflops"]["fp32"] > 0
    assert "test_gpu.py" in "".join(found["gpu_tests"]["result"]["output"])
    for name in ("ours", "ours_again"):
        numbers = found[name]["result"]
        assert numbers["tokens_per_second"] == pytest.approx(8 * BLOCK_SIZE / numbers["step_ms"] * 1e3, rel=0.01)
        assert numbers["options"]["per_device_train_batch_size"] == 4
    assert "bf16_residual" not in found["ours"]["result"]["options"]
    residual = found["warm"]["result"]["ours_residual"]["options"]
    assert residual["bf16_residual"] and not residual["sigmoid_gelu"]
    assert found["ours_again"]["result"]["largest_loss_difference"] == 0  # on a CPU they repeat bit for bit
    first, again = (found[name]["result"] for name in ("ours", "ours_again"))
    assert again["times_the_first"] == pytest.approx(again["tokens_per_second"] / first["tokens_per_second"], abs=1e-4)
    kernels = found["kernels"]["result"]
    assert "failed" in kernels["cudnn_attention"] and kernels["flash_attention"]["ms"] > 0
    flops = 2 * 4 * BLOCK_SIZE * 32 * 128
    assert kernels["matmul_mlp_in"]["tflops"] == pytest.approx(flops / kernels["matmul_mlp_in"]["ms"] / 1e9, abs=2e-4)
    real = found["real"]["result"]
    assert (real["stopped"]["exit_status"], real["exit_status"]) == (75, 0) and real["checkpoints"]
    steps = [event["step"] for event in real["events"] if event["event"] == "train"]
    assert steps == list(range(1, 41)) and real["summary"]["step"] == 40
    table = (tmp_path / "out" / "table.txt").read_text()
    assert table in output and [line.split()[0] for line in table.splitlines()[1:]] == names


@pytest.fixture
def run_here(arguments, tmp_path, monkeypatch):
    """Run the script in this process, which is faster."""
    first_gpu = load_program("scripts/benchmarks/first_gpu.py")
    monkeypatch.setattr(first_gpu, "find_machine", lambda: Machine("cpu", "a CPU", False, matmul_tflops={"fp32": 1.0}))
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the script changes it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*more):
        options = [*arguments, *more, "--output_dir", tmp_path / "out"]
        monkeypatch.setattr(sys, "argv", ["first_gpu.py", *map(str, options)])
        first_gpu.main()

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_failed_stage_does_not_stop_the_next(run_here, tmp_path):
    """Stages run in the script's order, each leaves a file, and the table lists them."""
    run_here("--stages", "nanogpt,ours,gpu_tests,machine")
    found = results(tmp_path)
    statuses = {name: entry["status"] for name, entry in found.items()}
    assert statuses == {"machine": "done", "gpu_tests": "failed", "ours": "done", "nanogpt": "failed"}
    assert found["gpu_tests"]["reason"] == "the stage that starts it did not run"
    assert found["nanogpt"]["reason"] == "ValueError: this nanoGPT fails"
    assert found["ours"]["result"]["tokens_per_second"] > 0
    table = (tmp_path / "out" / "table.txt").read_text().splitlines()[1:]
    assert [line.split()[0] for line in table] == list(found)


def test_stopped_it_writes_what_exists(run_here, tmp_path):
    """SIGTERM ends the measured run, and the other stages are recorded as not run."""
    started = sigterm_when(lambda: list(tmp_path.glob("*/*/run/metrics.jsonl")))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), started:
        run_here("--steps", 40_000, "--stages", "machine,ours,kernels")
    found = results(tmp_path)
    assert {name: entry["status"] for name, entry in found.items()} == {
        "machine": "done", "ours": "failed", "kernels": "not run"
    }  # fmt: skip
    assert found["ours"]["reason"].startswith("stopped: SystemExit")
    assert found["kernels"]["reason"] == "stopped earlier"
    assert "kernels" in (tmp_path / "out" / "table.txt").read_text()


def test_a_stage_that_does_not_fit_is_not_run(run_here, tmp_path, capsys):
    """In six seconds no stage starts; the files are in order of importance and say how long each stage needs."""
    run_here("--minutes", 0.1)
    assert "machine              not run" in capsys.readouterr().out
    found = results(tmp_path)
    assert list(found) == [
        "machine", "warm", "gpu_tests", "ours", "ours_without_levers", "nanogpt", "ours_residual", "ours_small",
        "nanogpt_default", "ours_again", "kernels", "real", "coordinate_descent",
    ]  # fmt: skip
    assert {entry["status"] for entry in found.values()} == {"not run"}
    assert found["machine"]["reason"] == "6 s left, needs up to 25"


def test_an_unknown_stage_is_refused(run_here, tmp_path):
    with pytest.raises(UserError, match="there is no stage 'kernel'; the stages are machine,"):
        run_here("--stages", "machine,kernel")
    assert not (tmp_path / "out").exists()
