"""A run leaves its process as it was, so a notebook can train again and again."""

import gc
import os
import signal
import sys
import threading
from unittest import mock

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from helpers import TINY, default_arguments, read_events
from torch._subclasses.fake_tensor import FakeTensor

import recipe.train
from recipe.errors import UserError, run_main
from recipe.run.folder import LOCKS
from recipe.run.log import RunLog
from recipe.run.stop import SIGNALS


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
    """However a run ends, the next one may have another precision, and go on in the same folder."""
    before = describe_process()
    options = ["--dynamo_backend", "aot_eager", "--save_steps", "1"]
    arguments = ["train.py", *default_arguments(dataset_dir, tmp_path / "run", TINY), *options]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, arguments)))
        if error is None:
            run_main(recipe.train.main)
        else:
            patch.setattr(RunLog, "record_steps", mock.Mock(side_effect=[None, None, error]))
            with pytest.raises((SystemExit, ZeroDivisionError)):
                run_main(recipe.train.main)
    assert describe_process() == before
    train("--mixed_precision", "bf16", "--resume_from_checkpoint", "auto", "--save_steps", 2, "--max_steps", 6)
    assert read_events(tmp_path / "run", "train")[-1]["step"] == 6
    assert describe_process() == before


def test_nothing_of_earlier_runs_is_left_in_memory(train, tmp_path):
    """The runs are compiled, and the second one has another size and precision."""
    before = tensor_bytes()
    after = []
    for number, (width, precision) in enumerate(((32, "no"), (64, "bf16"), (32, "no"))):
        shape = ["--config_overrides", f"n_layer=2,n_head=2,n_embd={width}", "--mixed_precision", precision]
        train(*shape, "--dynamo_backend", "aot_eager", output_dir=tmp_path / str(number))
        after.append(tensor_bytes())
    assert after == [before] * 3


def test_a_run_trains_in_a_thread_where_python_allows_no_signal_handlers(train, tmp_path):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert (tmp_path / "run" / "summary.json").is_file()
