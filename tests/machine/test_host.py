"""What a CPU offers a run: CPUs within quotas, threads that do not spin, resident memory that stays flat."""

import math
import os
import platform
import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers import BLOCK_SIZE, ROOT, TINY, default_arguments, read_events

from recipe import environment
from recipe.environment import count_cores, count_cpus, read_cpu_quotas
from recipe.evaluation import validation
from recipe.hardware.host_memory import FreedMemory
from recipe.hardware.processes import find_typed_threads

QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
FROM_A_LAUNCHER = {"OMP_NUM_THREADS": "1", "ACCELERATE_DYNAMO_BACKEND": "NO"}
on_linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")


def output_of(program: str, *arguments: object, **variables: str) -> str:
    """Run a program of tests/programs as from a shell without variables of OpenMP and of torch's allocator."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_", "THP_"))}
    command = [sys.executable, ROOT / "tests" / "programs" / program, *map(str, arguments)]
    options = {"cwd": ROOT, "env": {**inherited, "PYTHONPATH": str(ROOT), **variables}}
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


# ------------------------------------------------------------------ CPUs and threads


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
)
def test_the_quota_of_a_container_is_read(tmp_path, own, files, expected):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    found = read_cpu_quotas(tmp_path / "cgroup", tmp_path / "own")
    assert min(map(math.ceil, found), default=None) == expected


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
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),  # no launcher: the user's
        (FROM_A_LAUNCHER, None),  # the launcher's own
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None),
        (FROM_A_LAUNCHER | {"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OMP_NUM_THREADS": "all"}, None),
    ],
)
def test_a_number_of_threads_that_the_user_has_set_is_told_from_the_launchers(variables, expected):
    assert find_typed_threads(variables) == expected


@pytest.mark.parametrize(
    ("program", "variables", "expected"),
    [
        ("recipe/train.py", {}, "1000"),
        ("recipe/train.py", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("recipe/train.py", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("scripts/plan_run.py", {}, "1000"),
        ("scripts/generate_text.py", {}, "1000"),
    ],
)
def test_threads_do_not_spin_for_a_busy_neighbor_unless_the_user_wants_it(program, variables, expected):
    """The limit is set before torch is loaded. A probe whose threads spin has measured 0.2 GFLOP/s in fp32."""
    printed = output_of("watch_torch.py", "first", "GOMP_SPINCOUNT", program, **variables)
    assert printed == f"GOMP_SPINCOUNT={expected}\n"


# ------------------------------------------------------------------ memory


@on_linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_freed_memory_is_returned_to_the_system_when_enough_has_accumulated():
    *given, grown = output_of("free_between_live_blocks.py").split()
    assert given == ["True", "False", "False"]
    assert int(grown) < 1e8


def test_freed_memory_is_returned_after_each_step_and_each_batch_of_an_evaluation(train, monkeypatch):
    give_back = mock.Mock()
    monkeypatch.setattr(FreedMemory, "give_back", give_back)
    monkeypatch.setattr(validation, "CPU_TOKENS", 8 * BLOCK_SIZE)
    train("--max_steps", "3", "--max_eval_samples", "16")
    assert give_back.call_count == 3 + 2 * 2  # two evaluations of two batches of eight rows


@on_linux
def test_memory_is_flat_over_a_long_run_on_huge_pages(tmp_path, dataset_dir):
    """The peak of 48 steps and 4 evaluations is that of the first third, although all logits add up to 1 GB."""
    arguments = [*default_arguments(dataset_dir, tmp_path / "run", TINY), "--pad_vocab_to_multiple_of", "50304"]
    arguments += ["--global_batch_size", "2", "--max_steps", "48", "--logging_steps", "16", "--eval_steps", "16"]
    watched = ["watch_torch.py", "always", "THP_MEM_ALLOC_ENABLE", "recipe/train.py"]
    output = output_of(*watched, *arguments, "--max_eval_samples", "16")
    assert "THP_MEM_ALLOC_ENABLE=1\n" in output  # torch looks for it before its first tensor
    peaks = {event["step"]: event["peak_memory_bytes"] for event in read_events(tmp_path / "run", "train")}
    assert peaks[48] < peaks[16] + 2e8


def test_peak_memory_grows_with_allocations_and_stays_when_they_are_freed():
    """The peak belongs to the process alone. Linux's ru_maxrss would include the parent's peak."""
    torch.ones(2**28)  # 1 GB, in this process
    start, grown, again = map(int, output_of("print_peaks.py").split())
    assert start < 2**30
    assert 2**28 < grown - start < 2**30
    assert 0 <= again - grown < 2**28
