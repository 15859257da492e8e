"""What `auto` resolves to, and why; threads, compiled graphs."""

import os
import types

import pytest
import torch
from conftest import read_events
from torch._dynamo.utils import counters

from recipe import machine, runtime
from recipe.config import UserError, load_config
from recipe.environment import count_cpus
from recipe.runtime import choose_attention, choose_dynamo_backend, choose_mixed_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config_of(*argv):
    return load_config(["--dataset_dir", "d", *argv])[0]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "launcher", "device", "bf16", "expected"),
    [
        ([], "no", CPU, True, "bf16"),
        ([], "no", CPU, False, "no"),
        ([], "no", CUDA, True, "bf16"),
        ([], "no", CUDA, False, "fp16"),  # T4: is_bf16_supported() alone says yes, through emulation
        ([], "fp16", CUDA, True, "fp16"),
        ([], "bf16", CPU, False, "bf16"),
        (["--mixed_precision", "no"], "bf16", CPU, True, "no"),
        (["--mixed_precision", "bf16"], "no", CPU, False, "bf16"),
    ],
)
def test_precision(monkeypatch, argv, launcher, device, bf16, expected):
    """The script's option, else the launcher's, else what the hardware really has."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bf16})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16)
    choice = choose_mixed_precision(config_of(*argv), device)
    assert choice.value == expected and choice.reason


@pytest.mark.parametrize(
    ("launcher", "device", "message"), [("fp8", CUDA, "Conv1D"), ("fp16", CPU, "needs a CUDA device")]
)
def test_precision_that_would_not_work(monkeypatch, launcher, device, message):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    with pytest.raises(UserError, match=message):
        choose_mixed_precision(config_of(), device)


@pytest.mark.parametrize(
    ("argv", "launcher", "device", "flops", "compiler", "expected"),
    [
        ([], "no", CUDA, 1, None, "inductor"),
        ([], "NO", CPU, 1e13, "/usr/bin/g++", "no"),
        ([], "no", CPU, 1e16, "/usr/bin/g++", "inductor"),
        ([], "no", CPU, 1e16, None, "no"),
        ([], "INDUCTOR", CPU, 1e13, "/usr/bin/g++", "inductor"),
        (["--dynamo_backend", "no"], "inductor", CUDA, 1e16, None, "no"),
        (["--dynamo_backend", "aot_eager"], "no", CUDA, 1e16, None, "aot_eager"),
    ],
)
def test_dynamo(monkeypatch, argv, launcher, device, flops, compiler, expected):
    """Compile where it pays: always on a GPU, on a CPU if the run is long and there is a C++ compiler."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", launcher)
    monkeypatch.setattr(machine.shutil, "which", lambda name: compiler)
    choice = choose_dynamo_backend(config_of(*argv), device, flops)
    assert choice.value == expected and choice.reason


@pytest.mark.parametrize(
    ("argv", "device", "expected"),
    [
        (["--block_size", "512"], CPU, "eager"),
        (["--block_size", "1024"], CPU, "sdpa"),
        (["--block_size", "512"], CUDA, "sdpa"),
        (["--block_size", "64", "--attn_implementation", "sdpa_with_mask"], CPU, "sdpa_with_mask"),
    ],
)
def test_attention(argv, device, expected):
    """Plain matmuls where they are faster: on a CPU, up to 512 tokens."""
    assert choose_attention(config_of(*argv), device).value == expected


def test_compiled_code_is_kept(monkeypatch, tmp_path):
    """Where a reboot leaves it, unless the user has said where; and a home that cannot be written costs nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime.persist_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "gpt2_recipe" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    runtime.persist_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    runtime.persist_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""


def test_a_second_run_does_not_compile_again(train, tmp_path, monkeypatch):
    """Inductor finds the graphs of the first in its cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    hits = []
    for name in "ab":
        counters.clear()
        train("--dynamo_backend", "inductor", "--max_steps", "1", "--no_eval_on_start", output_dir=tmp_path / name)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
    assert hits[0] == 0 < hits[1]


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (["--bf16_residual"], "--bf16_residual needs bf16 mixed precision; here it is no"),
        (["--gpu_memory_limit_gb", "8"], "--gpu_memory_limit_gb needs a CUDA device, this is cpu"),
        (["--no_loss_in_graph", "--loss_chunks", "2"], "--loss_chunks needs the loss in the graph"),
        (["--profile", "0"], "profile must be at least 1"),
    ],
)
def test_switches_that_need_something_else(train, switches, message):
    with pytest.raises(UserError, match=message):
        train(*switches)


def test_all_cores_are_used_although_the_launcher_says_one(monkeypatch):
    """`accelerate launch` without a config sets OMP_NUM_THREADS=1; another number is the user's and is kept."""
    state = types.SimpleNamespace(device=CPU, num_processes=1)
    before = torch.get_num_threads()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    try:
        for value, expected in (("1", count_cpus()), ("3", 1)):
            torch.set_num_threads(1)
            monkeypatch.setenv("OMP_NUM_THREADS", value)
            runtime.use_all_cores(state)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_backend_of_the_launcher_that_would_not_work(monkeypatch):
    """CUDA graphs, for one, give wrong gradients with accumulation."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "CUDAGRAPHS")
    with pytest.raises(UserError, match="dynamo_backend cudagraphs is not one that works here"):
        choose_dynamo_backend(config_of(), CUDA, 1)


def test_one_graph_for_training_and_one_for_evaluation(train):
    """Compiled with fullgraph: no graph break, two graphs, and no recompilation in later steps or evaluations."""
    counters.clear()
    output_dir = train(
        "--dynamo_backend",
        "aot_eager",
        "--max_steps",
        "6",
        "--eval_steps",
        "2",
        "--per_device_train_batch_size",
        "2",
        "--mixed_precision",
        "bf16",
    )
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert len(read_events(output_dir, "eval")) == 4


def test_inductor_gives_the_losses_of_eager(train, tmp_path):
    """The compiled run learns what the plain one does."""
    plain = train(output_dir=tmp_path / "plain")
    compiled = train("--dynamo_backend", "inductor", output_dir=tmp_path / "compiled")
    for a, b in zip(read_events(plain, "train"), read_events(compiled, "train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_bf16_stays_near_fp32(train, tmp_path):
    """Autocast changes the losses by rounding only."""
    plain = train(output_dir=tmp_path / "fp32")
    half = train("--mixed_precision", "bf16", output_dir=tmp_path / "bf16")
    losses = [[e["loss"] for e in read_events(run, "train")] for run in (plain, half)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
