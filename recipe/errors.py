"""Mistakes that the user can fix: each becomes one sentence and a non-zero exit status, never a traceback."""

import contextlib
import difflib
import errno
import gc
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # see recipe/run/stop.py
# A full disk, an exceeded quota, a read-only file system, missing permission.
FIXABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
LOST_PEER = r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|timed out|remote process exited"


class UserError(Exception):
    """A mistake that the user can fix. The message says what was found, what was expected, and what fixes it."""


class ProcessError(UserError):
    """A `UserError` that may occur on one process only, so that process reports it whatever its rank."""


def run_main(main: Callable[[], T], interrupted: str = "interrupted") -> T:
    """Run a script's main function. A `UserError` or a full disk becomes one line on stderr and exit status 1.

    It restores the signal handlers that `main` replaces, because a notebook's kernel outlives the run.

    interrupted: the message that Ctrl-C prints.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
        handlers = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that the terminal cannot show must not end a run
            stream.reconfigure(errors="replace")
    try:
        return main()
    except BrokenPipeError:  # `--help | head` closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            if not lost_a_process(error):
                raise
            error = ProcessError(
                f"the connection to another process of this run is lost; its own output says why it ended; the same "
                f"command with --resume_from_checkpoint auto resumes from the newest checkpoint ({one_line(error)})"
            )
        if isinstance(error, OSError):
            if error.errno not in FIXABLE:
                raise
            error = ProcessError(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun ends its report with the message of the first process that failed, whichever that is
            report = json.dumps({"message": f"error: {error}", "timestamp": int(time.time())})
            with contextlib.suppress(OSError):  # the same disk may be full
                Path(error_file).write_text(report)
        if os.environ.get("RANK", "0") != "0" and not isinstance(error, ProcessError):
            sys.exit(1)  # the main process prints it
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def lost_a_process(error: RuntimeError) -> bool:
    """Return whether gloo, NCCL or the store of torch.distributed (2.13) reports that another process is gone.

    Their other errors, such as NCCL's "Duplicate GPU detected", are mistakes of this run and keep their traceback.
    """
    is_distributed = "gloo/transport" in str(error) or type(error).__name__.startswith("Dist")
    return is_distributed and bool(re.search(LOST_PEER, str(error), re.IGNORECASE))


def did_you_mean(
    name: str, known: Iterable[str], prefix: str = "", otherwise: str = "--help lists all options"
) -> str:
    """Suggest the known name closest to a mistyped one, or `otherwise` if none is close."""
    nearest = difflib.get_close_matches(name.replace("-", "_").removeprefix("no_"), known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{nearest[0]}?" if nearest else otherwise


def one_line(error: object) -> str:
    """Return the message of another library's exception in one line, or the exception's name if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def short_reason(error: BaseException) -> str:
    """Summarize another library's exception in one line: its name and message."""
    return f"{type(error).__name__}: {one_line(error)}"


def check_local_path(name: str) -> None:
    """Raise `UserError` for a local path that does not exist, before it is mistaken for a Hub id."""
    path = Path(name).expanduser()
    if not name.strip():
        raise UserError("the name of a folder or Hub id is empty")
    looks_local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or Path(path.parts[0]).is_dir()
    if looks_local and not path.exists():
        raise UserError(f"there is no folder {name}")
