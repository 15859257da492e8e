"""What every `auto` becomes: a table of facts, and a resumed run that keeps what was measured for it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from recipe import environment
from recipe.checkpoint import read_state
from recipe.command_line import load_config
from recipe.environment import count_cores, count_cpus, read_cpu_quotas
from recipe.errors import UserError
from recipe.hardware import accelerator, probe
from recipe.hardware.choices import Facts, choose, settle, to_measure
from recipe.hardware.probe import Measured, measure_rates
from recipe.hardware.processes import choose_typed_threads
from recipe.model.build import build_model_config

EPYC = Measured({"no": 3e11, "bf16": 6e11}, {"eager": 0.001, "sdpa": 0.002}, 4)  # bf16 pays, and plain attention
XEON = Measured({"no": 3.2e11, "bf16": 1.65e11}, {"eager": 0.003, "sdpa": 0.002}, 2)  # with AMX hidden from the guest
CLOSE = Measured({"no": 3e11, "bf16": 3.2e11}, {}, 4)
# Runs a program until it looks for torch, and prints what OpenMP will read then.
LOADS_TORCH = """
import importlib.machinery, os, runpy, sys

class Watch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
MODEL_PROGRAMS = ("plan_run", "evaluate_model", "generate_text")
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def config_of(*argv):
    return load_config(["--dataset_dir", "d", "--max_steps", "9", *argv])[0]


@pytest.mark.parametrize(
    ("argv", "facts", "measured", "label", "expected"),
    [
        # a CPU: what multiplies faster, and fp32 if there is no difference to speak of
        ("", {}, EPYC, "precision", "bf16"),
        ("", {}, XEON, "precision", "no"),
        ("", {}, CLOSE, "precision", "no"),
        ("", {"launcher_precision": "bf16"}, XEON, "precision", "bf16"),
        ("--mixed_precision no", {"launcher_precision": "bf16"}, EPYC, "precision", "no"),
        ("--mixed_precision bf16", {}, XEON, "precision", "bf16"),
        # other devices without data sheets are measured, too
        ("", {"device_type": "mps"}, EPYC, "precision", "bf16"),
        ("", {"device_type": "xpu"}, CLOSE, "precision", "no"),
        ("", {"device_type": "mps"}, EPYC, "dynamo", "no"),
        ("", {"device_type": "mps"}, EPYC, "attention", "sdpa"),
        # CUDA: nothing is measured
        ("", {"device_type": "cuda"}, None, "precision", "bf16"),
        ("", {"device_type": "cuda", "has_bf16": False}, None, "precision", "fp16"),
        ("", {"device_type": "cuda", "launcher_precision": "fp16"}, None, "precision", "fp16"),
        ("", {"device_type": "cuda"}, None, "dynamo", "inductor"),
        ("", {"device_type": "cuda", "why_no_inductor": "no Triton"}, None, "dynamo", "no"),
        ("", {"device_type": "cuda"}, None, "attention", "sdpa"),
        # compiling pays after 90 s of products at the measured rate: 5.4e13 FLOPs in bf16, 2.9e13 in fp32
        ("", {"total_flops": 4e13}, EPYC, "dynamo", "no"),
        ("", {"total_flops": 4e13}, XEON, "dynamo", "inductor"),
        ("", {"total_flops": 6e13}, EPYC, "dynamo", "inductor"),
        ("", {"total_flops": 6e13, "why_no_inductor": "no g++"}, EPYC, "dynamo", "no"),
        ("--max_minutes 3", {}, EPYC, "dynamo", "no"),
        ("--max_minutes 60", {}, EPYC, "dynamo", "inductor"),
        ("", {"launcher_backend": "inductor", "total_flops": 1.0}, EPYC, "dynamo", "inductor"),
        ("--dynamo_backend aot_eager", {"launcher_backend": "inductor"}, EPYC, "dynamo", "aot_eager"),
        # attention: plain where it is faster, never where it was too long to be measured
        ("", {}, EPYC, "attention", "eager"),
        ("", {}, XEON, "attention", "sdpa"),
        ("", {}, CLOSE, "attention", "sdpa"),
        ("--attn_implementation sdpa", {}, EPYC, "attention", "sdpa"),
        # threads: of the two numbers that make sense the fastest, unless the user has set one
        ("", {"thread_counts": (2, 4)}, EPYC, "threads", "4"),
        ("", {"thread_counts": (2, 4)}, XEON, "threads", "2"),
        ("", {"thread_counts": (2, 4), "typed_threads": 3}, EPYC, "threads", "3"),
        ("", {"thread_counts": (1, 2)}, EPYC, "threads", "2"),  # the main process's machine has more
    ],
)
def test_what_auto_becomes(argv, facts, measured, label, expected):
    choice = choose(config_of(*argv.split()), Facts(**{"device_type": "cpu"} | facts), measured)[label]
    assert choice.value == expected and choice.reason


@pytest.mark.parametrize(
    ("argv", "kept", "facts", "expected"),
    [
        ("", {}, {}, ["bf16", "inductor", "eager", "2"]),
        ("", {"device_type": "cuda"}, {}, ["bf16", "inductor", "eager", "2"]),  # another type of device: anew
        ("--mixed_precision bf16 --attn_implementation eager", {}, {}, ["bf16", "no", "eager", "1"]),
        ("", {}, {"thread_counts": (2, 3)}, ["no", "no", "sdpa", "3"]),  # another machine
        ("", {"dynamo_backend": "inductor"}, {"why_no_inductor": "no g++"}, ["no", "no", "sdpa", "1"]),
    ],
)
def test_a_resumed_run_keeps_what_was_measured(argv, kept, facts, expected):
    """Whatever is measured now, unless it is typed, impossible here, or the run moves to another type of device."""
    earlier = {"device_type": "cpu", "mixed_precision": "no", "dynamo_backend": "no"}
    earlier |= {"attn_implementation": "sdpa", "num_threads": 1}
    is_old = expected[0] == "bf16" and not argv and not kept  # a checkpoint of an older version has none of it
    facts = {"thread_counts": (1, 2), "kept": {} if is_old else earlier | kept} | facts
    choices = choose(config_of(*argv.split()), Facts("cpu", **facts), EPYC)
    assert [choices[label].value for label in ("precision", "dynamo", "attention", "threads")] == expected


def test_only_what_is_open_is_measured():
    typed = ["--mixed_precision", "no", "--dynamo_backend", "no", "--attn_implementation", "sdpa"]
    for argv, facts, expected in (
        ([], Facts("cpu"), ["no", "bf16"]),
        (typed[:2], Facts("cpu"), ["no"]),
        (typed, Facts("cpu"), []),
        (typed, Facts("cpu", thread_counts=(1, 2)), ["no"]),
        ([], Facts("cuda"), []),
        ([], Facts("mps"), ["no", "bf16"]),
    ):
        assert to_measure(settle(config_of(*argv), facts), facts) == expected


@pytest.mark.parametrize(
    ("argv", "facts", "message"),
    [
        ("", {"launcher_precision": "fp8", "device_type": "cuda"}, "Conv1D"),
        ("", {"launcher_precision": "fp16"}, "requires a CUDA device"),
        ("", {"launcher_backend": "tensorrt"}, "tensorrt does not work here"),
        ("--dynamo_backend inductor", {"why_no_inductor": "it requires X"}, "cannot compile: it requires X; use no"),
        ("", {"launcher_backend": "inductor", "why_no_inductor": "it requires X"}, "cannot compile: it requires X"),
        ("", {"launcher_mode": "fastest"}, "dynamo_mode is 'fastest'; use one of default, lite, "),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(argv, facts, message):
    with pytest.raises(UserError, match=message):
        settle(config_of(*argv.split()), Facts(**{"device_type": "cpu"} | facts))


def test_the_residual_stream_is_bf16_only_with_bf16():
    with pytest.raises(UserError, match="this run uses no: fp32 products are 1.9 times as fast as bf16 here"):
        choose(config_of("--bf16_residual"), Facts("cpu"), XEON)
    assert choose(config_of("--bf16_residual"), Facts("cpu"), EPYC)["residual"].value == "bf16"


# ---------------------------------------------------------------- the probe


def small_model(**shape):
    options = ",".join(f"{key}={value}" for key, value in {"n_layer": 2, "n_head": 2, "n_embd": 64, **shape}.items())
    return build_model_config(config_of("--config_overrides", options), 512, 0)


@pytest.mark.parametrize("factor", [0.5, 2.0, 40.0])  # 40: a processor that only emulates bf16
def test_the_ratio_of_the_rates_is_that_of_the_times(monkeypatch, factor):
    """Of a machine on which a product takes `factor` times as long in bf16, and a fifth of all calls five times."""
    calls = iter(range(10**9))

    def pretend(rounds, device, function):
        slow = 5.0 if next(calls) % 5 == 0 and rounds == 1 else 1.0
        return slow * (factor if function().dtype == torch.bfloat16 else 1.0) * 1e-3

    monkeypatch.setattr(probe, "best_of", pretend)
    monkeypatch.setattr(probe, "time_attention", lambda *_: {})
    found = measure_rates(torch.device("cpu"), small_model(), 32).flops_per_second
    assert found["no"] / found["bf16"] == pytest.approx(factor, rel=1e-6)
    assert (found["bf16"] > found["no"]) == (factor < 1)


def test_the_rate_counts_each_product_as_often_as_the_model_has_it(monkeypatch):
    """With 1 ns per FLOP in the vocabulary's products and 2 ns in the blocks', by hand."""
    width, vocab = 64, 512
    monkeypatch.setattr(probe, "SIDE_SECONDS", 0.0)  # 64 rows and columns
    monkeypatch.setattr(probe, "best_of", lambda rounds, device, function: 1e-3 if function().shape else 0)
    monkeypatch.setattr(probe, "time_attention", lambda *_: {})
    rate = measure_rates(torch.device("cpu"), small_model(), 32, ["no"]).flops_per_second["no"]
    # every product takes 1 ms, and has 64 x k x 64 multiply-adds of the k x columns that a token needs
    blocks = 2 * (2 * width * 4 * width) / (2 * 64 * 64 * 64) + 2 * 4 * width * width / (2 * 64 * 4 * 64 * 64)
    seconds = (blocks + width * vocab / (2 * 64 * 64 * 64)) * 1e-3
    assert rate == pytest.approx(2 * (2 * 12 * width * width + width * vocab) / 2 / seconds, rel=1e-9)


def test_a_probe_is_short_and_leaves_no_trace():
    """Also of a model of 1.5 B parameters; random state and threads stay as they were."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    large = small_model(n_layer=48, n_head=25, n_embd=1600)
    seen = []
    measured = None
    for _ in range(3):  # another program may take the core
        seconds = probe.best_of(
            1, torch.device("cpu"), lambda: seen.append(measure_rates(torch.device("cpu"), large, 1024))
        )
        measured = seen[-1]
        if seconds < 2:
            break
    assert seconds < 2
    assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads
    assert measured.flops_per_second["no"] > 1e8 and set(measured.attention_seconds) == {"eager", "sdpa"}
    assert measure_rates(torch.device("cpu"), small_model(), 4096, ["no"]).attention_seconds == {}


def test_another_device_is_waited_for(monkeypatch):
    """A product of an accelerator is over when the device says so."""
    waits = []
    module = type("Module", (), {"synchronize": staticmethod(lambda: waits.append(1))})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    measure_rates(torch.device("meta"), small_model(), 32)
    assert len(waits) > 20


def test_a_killed_run_keeps_its_answers(train, tmp_path, monkeypatch):
    """A run resumed with the probe's answer inverted ends with the weights of an uninterrupted one."""
    auto = ["--mixed_precision", "auto", "--dynamo_backend", "no", "--attn_implementation", "auto"]

    def run(name, measured, *argv):
        monkeypatch.setattr(accelerator, "measure_rates", lambda *_: measured)
        folder = train(*auto, *argv, output_dir=tmp_path / name)
        return (folder / "model.safetensors").read_bytes()

    whole = run("whole", EPYC)
    run("killed", EPYC, "--max_steps", "2", "--save_steps", "2")
    state = read_state(tmp_path / "killed" / "checkpoint-2").state.hardware
    assert (state["mixed_precision"], state["attn_implementation"]) == ("bf16", "eager")
    again = ["--resume_from_checkpoint", str(tmp_path / "killed" / "checkpoint-2")]
    assert run("resumed", XEON, *again) == whole
    assert run("other", XEON) != whole


def test_a_checkpoint_of_an_older_version_has_no_answers(train):
    folder = train("--save_steps", "2") / "checkpoint-2"
    content = json.loads((folder / "training_state.json").read_text())
    del content["hardware"]
    (folder / "training_state.json").write_text(json.dumps(content))
    assert read_state(folder).state.hardware == {}


# ---------------------------------------------------------------- CPUs and threads


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 2),  # v2: the parent's
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/docker/1f", {f"cpu,cpuacct/{QUOTA}": "250000", f"cpu,cpuacct/{PERIOD}": "100000"}, 3),  # v1
        ("1:cpu:/a", {f"cpu/a/{QUOTA}": "-1", f"cpu/a/{PERIOD}": "100000"}, None),
        ("7:memory:/a", {f"cpu/{QUOTA}": "100000", f"cpu/{PERIOD}": "100000"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_counts(tmp_path, own, files, expected):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    found = read_cpu_quotas(tmp_path / "cgroup", tmp_path / "own")
    assert min(map(math.ceil, found), default=None) == expected


def test_a_quota_of_one_cpu(tmp_path):
    """In a real group, where the system has them and lets us make one."""
    group = Path("/sys/fs/cgroup/cpu/gpt2_recipe_test")
    try:
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        pytest.skip("no cgroups v1 that this user may write to")
    program = "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
    program += "from recipe.environment import count_cpus; print(count_cpus())"
    try:
        command = [sys.executable, "-c", program, str(group)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    finally:
        group.rmdir()
    assert found.stdout.split() == ["1"]


def test_two_hyper_threads_share_a_core(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings + "\n")
    monkeypatch.setattr(environment, "list_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(environment, "Path", lambda text: tmp_path / text.lstrip("/"))
    monkeypatch.setattr(environment, "read_cpu_quotas", lambda: [])
    assert (count_cpus(), count_cores()) == (4, 2)


@pytest.mark.parametrize(
    ("environment", "launcher_had_it", "expected"),
    [
        ({}, False, None),
        ({"OMP_NUM_THREADS": "3"}, False, 3),
        ({"OMP_NUM_THREADS": "1"}, False, 1),  # no launcher: the user's
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_BACKEND": "NO"}, False, None),  # the launcher's own
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, False, None),
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_BACKEND": "NO"}, True, 1),  # the user's, passed on
        ({"OMP_NUM_THREADS": "2,1", "ACCELERATE_DYNAMO_BACKEND": "NO"}, False, 2),
        ({"OMP_NUM_THREADS": "all"}, False, None),
    ],
)
def test_whose_number_of_threads_it_is(environment, launcher_had_it, expected):
    assert choose_typed_threads(environment, launcher_had_it) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_do_not_spin_for_a_busy_neighbor(environment, expected):
    """Unless the user has decided how they wait."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    program = "import os, recipe; print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=inherited | environment)
    assert found.stdout.split() == [str(expected)]


@pytest.mark.parametrize("program", ["recipe/train.py", *(f"scripts/{name}.py" for name in MODEL_PROGRAMS)])
def test_torch_finds_the_limit_when_it_is_loaded(program):
    """With threads that spin, a probe beside busy neighbors once measured 0.2 GFLOP/s in fp32, and took bf16."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
    command = [sys.executable, "-c", LOADS_TORCH, program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=inherited)
    assert found.stdout == "1000\n"
