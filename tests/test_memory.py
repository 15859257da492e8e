"""Resident memory on a CPU stays flat over a long evaluation and a long training."""

import json
import os
import platform
import subprocess
import sys

import pytest
from conftest import PLAIN, ROOT, TINY

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")

# Frees 600 MB between small live blocks: glibc keeps those pages, because only the end of its heap shrinks.
FREED_BETWEEN_LIVE_BLOCKS = """
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

# Each turn frees two large tensors and keeps a small one after each.
LEAKY_LOOP = """
import random
import torch
from recipe.hardware.host_memory import FreedMemory, resident_bytes
torch.set_num_threads(1)
freed_memory, kept, rng = FreedMemory(), [], random.Random(0)
before = resident_bytes()
for _ in range(600):
    for sizes in ([300_000, 800_000, 1_600_000, 3_000_000, 6_000_000], [700_000, 1_500_000, 5_000_000]):
        large = torch.ones(rng.choice(sizes))
        kept.append(torch.ones(rng.choice([1, 16, 200, 3000])))
    freed_memory.give_back()
print(resident_bytes() - before)
"""

# Evaluates 600 batches of 16 tokens, whose logits over 50,304 tokens take 3.2 MB each.
LONG_EVALUATION = """
import types
import numpy as np, torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel
from recipe.command_line import load_config
from recipe.evaluation import validation
from recipe.evaluation.validation import Validation
from recipe.hardware.host_memory import resident_bytes
from recipe.model.loss import LanguageModelingLoss

class Rows:
    def __len__(self): return 600
    def __getitem__(self, indices): return np.random.default_rng(indices).integers(50257, size=(len(indices), 17))

torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=16, n_positions=16, vocab_size=50304))
module = LanguageModelingLoss(model, 50257)
class Tokenizer:
    def __len__(self): return 50257

validation.count_token_bytes = lambda tokenizer: np.ones(len(tokenizer), np.int64)
dataset = types.SimpleNamespace(validation=Rows(), tokenizer=Tokenizer())
Validation._sample = lambda self: None
options = ["--dataset_dir", "d", "--block_size", "16", "--max_eval_samples"]
first, second = (
    Validation(load_config([*options, rows])[0], Accelerator(cpu=True), module, dataset, 1) for rows in ("50", "all")
)
first.batch_size = second.batch_size = 1
first.run()
before = resident_bytes()
assert second.run()["num_rows"] == 600
print(resident_bytes() - before)
"""


def output_of(code: str) -> list[str]:
    """Run a program without huge pages, which would hide part of the fragmentation. Returns the printed lines."""
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    return result.stdout.splitlines()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_freed_memory_is_returned_once():
    """Only accumulated free memory is returned, and only when enough has accumulated."""
    given, grown = output_of(FREED_BETWEEN_LIVE_BLOCKS)
    assert given == "[True, False, False]"
    assert int(grown) < 1e8


def test_a_loop_that_fragments_the_heap_stays_flat():
    """With glibc 2.36 alone, it grows by 2 to 4 GB in most runs."""
    assert int(output_of(LEAKY_LOOP)[-1]) < 6e8


def test_huge_pages_are_requested_before_torch_is_imported():
    """Torch's allocator reads the variable once."""
    code = (  # transformers looks for torch earlier, without importing it
        "import os, runpy, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch' and 'THP_MEM_ALLOC_ENABLE' in os.environ:\n"
        "            print(os.environ['THP_MEM_ALLOC_ENABLE']); sys.exit()\n"
        "sys.meta_path.insert(0, Watch())\n"
        "sys.argv = ['train.py']\n"
        "runpy.run_path('recipe/train.py', run_name='__main__')"
    )
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert result.stdout == "1\n"


def test_memory_is_flat_over_a_long_evaluation():
    """600 batches take no more memory than 50, although their logits add up to 1.9 GB."""
    assert int(output_of(LONG_EVALUATION)[-1]) < 4e8


def test_memory_is_flat_over_a_long_training(tmp_path, dataset_dir):
    """The peak of 48 steps is that of the first 16, although the logits of all steps add up to 0.6 GB."""
    options = ["--dataset_dir", dataset_dir, *TINY, *PLAIN, "--pad_vocab_to_multiple_of", "50304"]
    options += ["--global_batch_size", "2", "--max_steps", "48", "--logging_steps", "16"]
    options += ["--save_steps", "0", "--max_eval_samples", "8"]
    command = [sys.executable, ROOT / "recipe" / "train.py", *options, "--eval_steps", "0", "--output_dir", "run"]
    subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, capture_output=True)
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    peaks = {event["step"]: event["peak_memory_bytes"] for event in events if event["event"] == "train"}
    assert peaks[48] < peaks[16] + 2e8
