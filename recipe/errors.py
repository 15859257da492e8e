"""Mistakes that the user can fix: each becomes one sentence and a non-zero exit status, never a traceback."""

import contextlib
import difflib
import errno
import json
import os
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from recipe.launcher import forget_launcher, local_rank

# A full disk, an exceeded quota, a read-only file system, missing permission.
FIXABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
TURN_SECONDS = 0.5  # a launcher looks every 0.1 s whether a process has ended (torch 2.13)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
QUOTE = reprlib.Repr()
QUOTE.maxlevel = 2
QUOTE.maxdict = 8
QUOTE.maxstring = 200
QUOTE.maxother = 200
LOST_PEER = r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|timed out|remote process exited"


class UserError(Exception):
    """A mistake that the user can fix. The message says what was found, what was expected, and what fixes it."""


class LostProcessError(UserError):
    """Another process has ended. The same command may succeed the next time."""


def run_main(main: Callable[[], int | None], interrupted: str = "interrupted", is_alone: bool = False) -> None:
    """Run a script's main function, and exit with its status if that is not 0.

    A `UserError` or a full disk becomes one line on stderr and exit status 1. interrupted: what Ctrl-C prints.
    is_alone: the program is one process, so a launcher's variables are removed.
    """
    if is_alone:
        forget_launcher(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a character that the terminal cannot show must not end a run
    try:
        status = main()
    except BrokenPipeError:  # `--help | head` closes the pipe
        status = 1
    except (UserError, OSError, RuntimeError) as error:
        status = _report(error)
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        status = 130
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # the interpreter tries again when it exits, and would turn the status into 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if status:  # outside `except`: a notebook would keep the error, and with it the run's tensors
        sys.exit(status)


def _report(error: Exception) -> str:
    """Return the exit status for an error that the user can fix: its message. Raises any other error again."""
    if isinstance(error, RuntimeError):
        if not lost_a_process(error):
            raise error
        error = LostProcessError(
            f"the connection to another process of this run is lost; its own output says why it ended; the same "
            f"command with --resume_from_checkpoint auto resumes from the newest checkpoint ({one_line(error)})"
        )
    if isinstance(error, OSError):
        if error.errno not in FIXABLE:
            raise error
        error = UserError(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends its report with the message of the first process that failed, whichever that is
        report = json.dumps({"message": f"error: {error}", "timestamp": int(time.time())})
        with contextlib.suppress(OSError):  # the same disk may be full
            Path(error_file).write_text(report)
    # One process per machine prints an error that all of them find: its launcher ends the others while they wait.
    time.sleep(TURN_SECONDS * local_rank())
    return printable(f"error: {error}")


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
    nearest = difflib.get_close_matches(name.replace("-", "_").removeprefix("no_"), known, n=1, cutoff=0.75)
    return f"did you mean {prefix}{nearest[0]}?" if nearest else otherwise


def printable(text: str) -> str:
    """Return a text that cannot control a terminal, whatever is in a file name or in what a model says."""
    return CONTROL.sub(" ", text)


def quote(value: object) -> str:
    """Return a value for a message. YAML makes millions of items of a few aliases: of a long value, the beginning."""
    return QUOTE.repr(value)[:200]


def one_line(error: object) -> str:
    """Return the message of another library's exception in one line, or the exception's name if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def plural(count: int, word: str, ending: str = "s") -> str:
    """Return a number of things: `1 process`, `2 processes` (ending: es)."""
    return f"{count:,} {word}" + (ending if count != 1 else "")


def short_reason(error: BaseException) -> str:
    """Summarize another library's exception in one line: its name and message.

    A full disk is reported as such, even behind the error of torch closing its file (2.13) or in safetensors' words.
    """
    cause: BaseException | None = error
    while cause is not None:
        for reason in map(os.strerror, FIXABLE):
            if reason in str(cause):
                return reason
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {one_line(error)}"


def check_local_path(name: str) -> None:
    """Raise `UserError` for a local path that does not exist, before it is mistaken for a Hub id."""
    path = Path(name)
    if not name.strip():
        raise UserError("the name of a folder or Hub id is empty")
    looks_local = path.is_absolute() or name.startswith(".") or bool(path.parts[2:]) or Path(path.parts[0]).is_dir()
    if looks_local and not path.exists():
        raise UserError(f"there is no folder {name}")
