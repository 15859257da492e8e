"""A notebook: the documented cell trains, again and again in one process, which every run leaves as it was."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from unittest import mock

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from conftest import ROOT, TINY, default_arguments, read_events
from torch._subclasses.fake_tensor import FakeTensor

import recipe.train
from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.run.folder import LOCKS
from recipe.run.log import RunLog
from recipe.run.stop import SIGNALS

# Packages that prepare text and evaluate, which many GPU images lack. A packed dataset needs none of them.
LACKING = ("datasets", "evaluate", "orjson", "xxhash", "gigatoken")


def test_the_cell_of_the_readme_trains(dataset_dir, tmp_path):
    """It runs as it stands, twice in one process, with other options; its own are valid."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "accelerate_configs" / "README.md").read_text(), re.DOTALL)
    cell = next(block for block in blocks if "notebook_launcher" in block)
    options = re.search(r'"(--config .*?)"', cell)[1]
    assert load_config(options.split())
    code = [f"import sys; sys.modules.update(dict.fromkeys({LACKING}))"]
    for name in ("first", "second"):
        arguments = [str(text) for text in default_arguments(dataset_dir, tmp_path / name, TINY)]
        code.append(cell.replace(options, " ".join(arguments)))
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def describe_process():
    """Return what a run changes in its process."""
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR2)],
        "accelerate": (PartialState._shared_state, AcceleratorState._shared_state),
        "garbage": (gc.isenabled(), gc.get_freeze_count()),
        "locks": (LOCKS, [file.path for file in psutil.Process().open_files() if file.path.endswith(".lock")]),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "precision": torch.get_float32_matmul_precision(),
    }


def tensor_bytes():
    """Return the memory of all tensors; torch keeps some fake ones, which have none, of the graphs it has traced."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return sum(found.nbytes for found in tensors if not isinstance(found, FakeTensor))


@pytest.mark.parametrize("error", [None, UserError("a mistake"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_run_leaves_its_process_as_it_was(train, dataset_dir, tmp_path, monkeypatch, error):
    """Also after an error. The next run may have another precision, and go on in the same folder."""
    before, options = describe_process(), ["--dynamo_backend", "aot_eager", "--save_steps", "1"]
    arguments = ["train.py", *default_arguments(dataset_dir, tmp_path / "run", TINY), *options]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, arguments)))
        if error is None:
            run_main(recipe.train.main)
        else:
            patch.setattr(RunLog, "train", mock.Mock(side_effect=[None, None, error]))
            with pytest.raises((SystemExit, ZeroDivisionError)):
                run_main(recipe.train.main)
    assert describe_process() == before
    train("--mixed_precision", "bf16", "--resume_from_checkpoint", "auto", "--save_steps", 2, "--max_steps", 6)
    assert read_events(tmp_path / "run", "train")[-1]["step"] == 6
    assert describe_process() == before


def test_the_second_run_takes_no_more_memory_than_the_first(train, tmp_path):
    """Of another size and precision, and compiled: nothing of the first is left."""
    before, after = tensor_bytes(), []
    for number, (width, precision) in enumerate(((32, "no"), (64, "bf16"), (32, "no"))):
        shape = ["--config_overrides", f"n_layer=2,n_head=2,n_embd={width}", "--mixed_precision", precision]
        train(*shape, "--dynamo_backend", "aot_eager", output_dir=tmp_path / str(number))
        after.append(tensor_bytes())
    assert after == [before] * 3


def test_a_run_in_another_thread(train, tmp_path):
    """Where Python allows no signal handlers."""
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (tmp_path / "run" / "summary.json").is_file()
