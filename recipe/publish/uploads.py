"""Uploads during a run: in the background, one at a time, and never in the way of training."""

import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState

from recipe.config import TrainConfig
from recipe.errors import short_reason
from recipe.publish.hub import (
    MODEL_FILES,
    SPOOL_NAME,
    TRAINING_FILES,
    hub_reason,
    is_permanent,
    publishes_training_state,
    retry_after,
    stage,
    upload,
)

RETRY_SECONDS = (60.0, 300.0, 900.0)  # after the first failure in a row, the second, and each later one
LAST_RETRY_SECONDS = (5.0, 20.0)  # at the end of a run
FINISH_SECONDS = 300.0  # for all uploads at the end of a run
FINAL_NAME = "final"  # the staging folder of the final model; those of checkpoints are named step-000400


class HubUploads:
    """Uploads checkpoints while the run continues, and the final model. Without `push_to_hub` it does nothing.

    A staged checkpoint outlives pruning and the process: the next process of the run, or scripts/push_to_hub.py,
    uploads what is left. A newer checkpoint replaces those that still wait, unless all of them are wanted.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_id: str,
        output_dir: Path,
        say: Callable[[str], None],
        repeat: str | None = None,
        keeps_all: bool = False,
    ) -> None:
        """say: prints a line. repeat: the command that repeats failed uploads. keeps_all: upload every checkpoint."""
        self.config, self.run_id, self.output_dir, self.say = config, run_id, output_dir, say
        self.enabled = config.push_to_hub and PartialState().is_main_process
        overwrite = " --hub_overwrite" if config.hub_overwrite else ""
        self.repeat = repeat or f"python scripts/push_to_hub.py {shlex.quote(str(output_dir))}{overwrite}"
        self.keeps_all = keeps_all or config.hub_strategy == "all_checkpoints"
        self.spool, self.final_step = output_dir / SPOOL_NAME, None
        self.thread: threading.Thread | None = None
        self.failures: dict[str, str] = {}  # staging folder -> why its last upload failed
        self.refused: set[str] = set()  # those that another attempt would not change
        self.num_skipped = 0  # checkpoints that a newer one replaced
        self.num_failures, self.retry_at = 0, 0.0  # in a row
        self.url: str | None = None
        self.any_waiting = True  # an earlier process of the run may have left some
        self.gives_up_at, self.interrupted = math.inf, lambda: False

    def add(self, checkpoint: Path, step: int) -> None:
        """Stage a complete checkpoint for its upload. Any thread can call this."""
        if self.enabled and self.config.hub_strategy != "end":
            names = MODEL_FILES + (TRAINING_FILES if publishes_training_state(self.config) else ())
            stage(checkpoint, self.spool / f"step-{step:06d}", names)
            self.any_waiting = True

    def advance(self) -> None:
        """Start to upload what is staged, unless uploads are running. Call it after each step; it never waits."""
        is_idle = self.thread is None or not self.thread.is_alive()
        if self.enabled and self.any_waiting and is_idle and time.monotonic() >= self.retry_at:
            self._start()

    def finish(
        self,
        final_step: int | None = None,
        seconds: float = FINISH_SECONDS,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Upload what is left, and say where it is, or how to repeat what failed. The end of a run waits for this.

        final_step: of the final model in output_dir, which is uploaded too; None if the run stopped before its end.
        seconds: give up after this time, or when `interrupted` says that a signal has arrived. Returns whether
        everything is on the Hub.
        """
        if not self.enabled:
            return True
        self.interrupted, self.gives_up_at = interrupted, time.monotonic() + seconds
        self.refused.clear()  # a new token, for example, may change that
        if final_step is not None:
            try:
                stage(self.output_dir, self.spool / FINAL_NAME, MODEL_FILES)
                self.final_step = final_step
            except OSError as error:  # a full disk, on a file system without links
                self.failures[FINAL_NAME] = short_reason(error)
        if self._staged():
            limit = "" if seconds == math.inf else f", for at most {seconds:.0f} s"
            self.say(f"uploading to {self.config.hub_model_id}{limit}")
        self._wait()  # for what is running
        for pause in (0.0, *LAST_RETRY_SECONDS):
            if self._staged().keys() <= self.refused:
                break
            self._pause(pause)
            if not self._gives_up():
                self._start()
                self._wait()
        self._report(seconds)
        return not self.failures and not self.num_skipped

    @property
    def is_stuck(self) -> bool:
        """Whether an upload has not come back when it was given up."""
        return self.thread is not None and self.thread.is_alive()

    def leave(self, code: int) -> int:
        """Return the exit status, or end the process if an upload hangs: the client's threads would keep it alive."""
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _staged(self) -> dict[str, tuple[Path, int]]:
        """Return the folders that wait for their upload, with their steps, oldest first, the final model last."""
        folders = sorted(self.spool.glob("step-*"), key=lambda path: int(path.name[5:]))
        staged = {path.name: (path, int(path.name[5:])) for path in folders}
        if self.final_step is not None and (self.spool / FINAL_NAME).is_dir():
            staged[FINAL_NAME] = self.spool / FINAL_NAME, self.final_step
        return staged

    def _skip_replaced(self) -> None:
        """Drop the checkpoints that a newer one replaces, or, with `checkpoint`, only their training state."""
        folders = [folder for name, (folder, _) in self._staged().items() if name != FINAL_NAME]
        for folder in folders[:-1]:
            if not self.keeps_all:
                shutil.rmtree(folder, ignore_errors=True)
                self.num_skipped += 1
                self.failures.pop(folder.name, None)
            elif self.config.hub_strategy == "checkpoint":
                for name in TRAINING_FILES:
                    (folder / name).unlink(missing_ok=True)

    def _start(self) -> None:
        self.any_waiting = False  # before the thread looks, because `add` may come in between
        self.thread = threading.Thread(target=self._upload_staged, daemon=True)  # Python's end waits for no daemon
        self.thread.start()

    def _upload_staged(self) -> None:
        self._skip_replaced()
        for name, (folder, step) in self._staged().items():
            try:
                is_final = name == FINAL_NAME
                self.url = upload(self.config, self.run_id, self.output_dir, folder, step, is_final)
                self.failures.pop(name, None)
                self.num_failures = 0
            except Exception as error:  # the client passes on the errors of several libraries
                if not self.failures:
                    self.say(f"warning: the upload of {name} failed and will be repeated: {hub_reason(error)}")
                self.failures[name] = hub_reason(error)
                self.refused |= {name} if is_permanent(error) else set()
                pause = RETRY_SECONDS[min(self.num_failures, len(RETRY_SECONDS) - 1)]
                self.retry_at = time.monotonic() + max(pause, retry_after(error))
                self.num_failures += 1
                self.any_waiting = True

    def _gives_up(self) -> bool:
        return time.monotonic() >= self.gives_up_at or self.interrupted()

    def _wait(self) -> None:
        """Wait for the uploads that are running, until it is time to give up."""
        while self.is_stuck and not self._gives_up():
            self.thread.join(0.1)  # in short turns, because a signal may arrive

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._gives_up():
            time.sleep(min(0.1, seconds))

    def _report(self, seconds: float) -> None:
        """Say where the uploads are, and how to repeat those that are missing."""
        given_up = "interrupted by a signal" if self.interrupted() else ""
        for name in self._staged():
            self.failures.setdefault(name, given_up or f"not finished within {seconds:.0f} s")
        if self.url is not None:
            self.say(f"{'partly ' * bool(self.failures)}published at {self.url}")
        for reason in dict.fromkeys(self.failures.values()):
            names = [name for name in self.failures if self.failures[name] == reason]
            shown = names if len(names) < 5 else [*names[:2], f"{len(names) - 3} more", names[-1]]
            self.say(f"not uploaded: {', '.join(shown)} ({reason})")
            if "xet" in reason.lower():
                self.say("HF_HUB_DISABLE_XET=1 uploads without Xet, which some networks block")
        if self.num_skipped:
            reason = "replaced by newer ones before their upload; --hub_strategy all_checkpoints uploads all"
            self.say(f"{self.num_skipped} checkpoint{'s were' if self.num_skipped > 1 else ' was'} {reason}")
        if self.failures or self.num_skipped:
            self.say(f"to upload what is missing:\n    {self.repeat}")
