"""A notebook: the documented cell trains, twice in one process, and the kernel keeps its signal handlers."""

import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, default_arguments

from recipe.command_line import load_config
from recipe.errors import UserError, run_main
from recipe.run.stop import SIGNALS, StopSignals

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


@pytest.mark.parametrize("error", [UserError("a mistake"), KeyboardInterrupt(), ZeroDivisionError()])
def test_no_signal_handler_is_left_behind(error):
    """A failed run must not catch the interrupts of the kernel's next cells."""

    def fail():
        with StopSignals():
            raise error

    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises((SystemExit, ZeroDivisionError)):
        run_main(fail)
    assert [signal.getsignal(number) for number in SIGNALS] == before
