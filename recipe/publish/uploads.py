"""Uploads during a run: in the background, one at a time, and never in the way of training."""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState

from recipe.arguments import shell_command
from recipe.config import TrainConfig
from recipe.errors import short_reason
from recipe.publish.hub import (
    MODEL_FILES,
    SPOOL_NAME,
    TRAINING_FILES,
    hub_reason,
    link_files,
    publishes_training_state,
    upload,
)

PAUSE_SECONDS = 10.0  # between the two attempts at the end of a run
REPORT_SECONDS = 60.0  # between the lines that say what the end of a run waits for
FINAL_NAME = "final"  # the staging folder of the final model; those of checkpoints are named step-000400


class HubUploads:
    """Uploads checkpoints while the run continues, and the final model. Without `push_to_hub` it does nothing.

    A staged checkpoint outlives pruning and the process: the next process of the run, or scripts/push_to_hub.py,
    uploads what is left. A newer checkpoint replaces older ones in the queue, unless all of them are wanted.
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
        self.config = config
        self.run_id = run_id
        self.output_dir = output_dir
        self.say = say
        self.enabled = config.push_to_hub and PartialState().is_main_process
        consent = {"hub_overwrite": True} if config.hub_overwrite else {}
        self.repeat = repeat or shell_command("python", "scripts/push_to_hub.py", output_dir, **consent)
        self.keeps_all = keeps_all or config.hub_strategy == "all_checkpoints"
        self.spool = output_dir / SPOOL_NAME
        self.final_step = None
        self.thread: threading.Thread | None = None
        self.is_new = True  # something has been staged since the last attempt, or by an earlier process of the run
        self.failures: dict[str, str] = {}  # staging folder -> why its last upload failed
        self.num_skipped = 0  # checkpoints that a newer one replaced
        self.url: str | None = None

    def add(self, checkpoint: Path, step: int) -> None:
        """Stage a complete checkpoint for its upload. Any thread can call this."""
        if self.enabled and self.config.hub_strategy != "end":
            names = MODEL_FILES + (TRAINING_FILES if publishes_training_state(self.config) else ())
            link_files(checkpoint, self.spool / f"step-{step:06d}", names)
            self.is_new = True

    def advance(self) -> None:
        """Upload what is staged, and what failed before, if there is something new. Call it often; it never waits."""
        if self.enabled and self.is_new and not self.is_running:
            self._start()

    def finish(
        self,
        final_step: int | None = None,
        seconds: float = math.inf,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Upload what is left, the final model first, and say where it is, or how to upload what is missing.

        final_step: of the final model in output_dir; None if the run stopped before its end. Waits until all is
        uploaded or has failed twice, for at most `seconds`, or until `interrupted` says that a signal has arrived.
        Returns whether all is on the Hub.
        """
        if not self.enabled:
            return True
        until = time.monotonic() + seconds
        report_at = time.monotonic() + REPORT_SECONDS
        if final_step is not None:
            try:
                link_files(self.output_dir, self.spool / FINAL_NAME, MODEL_FILES)
                self.final_step = final_step
            except OSError as error:  # a full disk, on a file system without links
                self.failures[FINAL_NAME] = short_reason(error)

        has_started = False  # the upload at the end: what began during training comes first
        while self.is_running or (self._staged() and not has_started):
            if interrupted() or time.monotonic() >= until:
                break
            if not self.is_running:
                self.say(f"uploading to {self.config.hub_model_id}")
                self._start(num_attempts=2)
                has_started = True
            if time.monotonic() >= report_at:
                self.say(f"still uploading to {self.config.hub_model_id}: {', '.join(self._staged())}")
                report_at += REPORT_SECONDS
            time.sleep(0.1)
        self._report("interrupted by a signal" if interrupted() else "not finished in time")
        return not self.failures

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def leave(self, code: int) -> int:
        """Return the exit status, or end the process if an upload hangs: the client's threads would keep it alive."""
        if self.is_running:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _staged(self) -> dict[str, tuple[Path, int]]:
        """Return the folders that wait for their upload, with their steps: the final model, then the oldest first."""
        folders = sorted(self.spool.glob("step-*"), key=lambda path: int(path.name[5:]))
        staged = {path.name: (path, int(path.name[5:])) for path in folders}
        if self.final_step is not None and (self.spool / FINAL_NAME).is_dir():
            staged = {FINAL_NAME: (self.spool / FINAL_NAME, self.final_step), **staged}
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

    def _start(self, num_attempts: int = 1) -> None:
        self.is_new = False  # before the thread looks, because `add` may come in between
        # Python's end does not wait for a daemon.
        self.thread = threading.Thread(target=self._upload_staged, args=(num_attempts,), daemon=True)
        self.thread.start()

    def _upload_staged(self, num_attempts: int) -> None:
        for attempt in range(num_attempts):
            if attempt > 0 and self._staged():
                time.sleep(PAUSE_SECONDS)
            self._skip_replaced()
            for name, (folder, step) in self._staged().items():
                try:
                    is_final = name == FINAL_NAME
                    self.url = upload(
                        self.config, self.run_id, self.output_dir, folder, step, self.final_step, is_final
                    )
                    self.failures.pop(name, None)
                except Exception as error:  # the client passes on the errors of several libraries
                    if not self.failures:
                        self.say(f"warning: the upload of {name} failed and will be repeated: {hub_reason(error)}")
                    self.failures[name] = hub_reason(error)

    def _report(self, otherwise: str) -> None:
        """Say where the uploads are, and how to upload what is missing. otherwise: why, if it has not failed."""
        for name in self._staged():
            self.failures.setdefault(name, otherwise)
        if self.url is not None:
            partly = "partly " if self.failures else ""
            self.say(f"{partly}published at {self.url}")
        for name, reason in self.failures.items():
            self.say(f"not uploaded: {name} ({reason})")
        if self.num_skipped:
            remedy = "all: --hub_strategy all_checkpoints"
            self.say(f"checkpoints replaced before upload: {self.num_skipped} ({remedy})")
        if self.failures:
            self.say(f"to upload what is missing:\n    {self.repeat}")
