"""TODO"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class UserError(Exception):
    """Something the user can put right. The message says what was found, what was expected and what to do."""


class ProcessError(UserError):
    """One that a single process meets, and says whatever its rank; the launcher ends the others."""


def run_main(main: Callable[[], T], interrupted: str = "interrupted") -> T:
    """Run a script: a `UserError` becomes one line on stderr, from one process, and exit status 1.

    interrupted: the message when the script is stopped from the keyboard. Returns what `main` returns.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character the terminal cannot show must not end a run
            stream.reconfigure(errors="replace")
    try:
        return main()
    except BrokenPipeError:  # `--help | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0" and not isinstance(error, ProcessError):
            sys.exit(1)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats it at the end of its report
            Path(error_file).write_text(json.dumps({"message": f"error: {error}", "timestamp": int(time.time())}))
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(130)


def short_reason(error: BaseException) -> str:
    """Return an exception's type and the first 200 characters of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def check_not_a_missing_folder(name: str) -> None:
    """Raise `UserError` for a path that is not there, before its name is looked for on the Hub."""
    path = Path(name).expanduser()
    if not name.strip():
        raise UserError("the name of a folder or Hub id is empty")
    looks_local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or Path(path.parts[0]).is_dir()
    if looks_local and not path.exists():
        raise UserError(f"there is no folder {name}")
