"""Resident memory on a CPU stays flat, and freed memory goes back to the system."""

import os
import platform
import subprocess
import sys
from unittest import mock

import pytest
from conftest import BLOCK_SIZE, ROOT, TINY, default_arguments, read_events

from recipe.evaluation import validation
from recipe.hardware.host_memory import FreedMemory

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")

# Frees 600 MB between small live blocks: glibc keeps those pages, because only the end of its heap shrinks.
FREED_BETWEEN_LIVE_BLOCKS = """
from recipe.evaluation import validation
from recipe.hardware.host_memory import FreedMemory, resident_bytes
freed_memory = FreedMemory()
freed_memory.give_back()
before = resident_bytes()
blocks = [(bytearray(100_000), bytearray(1_000)) for _ in range(6000)]
small = [small for _, small in blocks]
del blocks
assert resident_bytes() - before > 5e8, "glibc returned the pages by itself"
given = [freed_memory.give_back() for _ in range(3)]
print(given)
print(resident_bytes() - before)
"""

# Runs recipe/train.py as a program, and prints what torch will read of its environment when it is imported.
TRAIN = """
import importlib.machinery, os, runpy, sys

class Watch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):  # transformers looks for torch earlier, without importing it
        if name == "torch" and "THP_MEM_ALLOC_ENABLE" in os.environ:
            print("huge pages:", os.environ["THP_MEM_ALLOC_ENABLE"])

sys.meta_path.insert(0, Watch)
runpy.run_path("recipe/train.py", run_name="__main__")
"""


def output_of(code: str, *arguments: object) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_freed_memory_is_returned_once():
    """Only accumulated free memory is returned, and only when enough has accumulated."""
    given, grown = output_of(FREED_BETWEEN_LIVE_BLOCKS).splitlines()
    assert given == "[True, False, False]"
    assert int(grown) < 1e8


def test_freed_memory_is_returned_after_each_step_and_each_batch_of_an_evaluation(train, monkeypatch):
    give_back = mock.Mock()
    monkeypatch.setattr(FreedMemory, "give_back", give_back)
    monkeypatch.setattr(validation, "CPU_TOKENS", 8 * BLOCK_SIZE)
    train("--max_steps", "3", "--max_eval_samples", "16")
    assert give_back.call_count == 3 + 2 * 2  # two evaluations of two batches of eight rows


def test_memory_is_flat_over_a_long_run(tmp_path, dataset_dir):
    """The peak of 48 steps and 4 evaluations is that of the first third, although all logits add up to 1 GB.

    Large tensors lie on huge pages, for which torch must find the variable before its first tensor.
    """
    arguments = [*default_arguments(dataset_dir, tmp_path / "run", TINY), "--pad_vocab_to_multiple_of", "50304"]
    arguments += ["--global_batch_size", "2", "--max_steps", "48", "--logging_steps", "16", "--eval_steps", "16"]
    output = output_of(TRAIN, *arguments, "--max_eval_samples", "16")
    assert "huge pages: 1" in output
    peaks = {event["step"]: event["peak_memory_bytes"] for event in read_events(tmp_path / "run", "train")}
    assert peaks[48] < peaks[16] + 2e8
