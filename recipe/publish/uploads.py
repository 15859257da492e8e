"""Uploads during a run: in the background, one at a time, and never in the way of training."""

import contextlib
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import NoReturn

from accelerate import PartialState
from huggingface_hub import HfApi

from recipe.checkpoint import checkpoint_dir
from recipe.config import TrainConfig
from recipe.errors import short_reason
from recipe.publish.hub import (
    FINAL_NAME,
    MODEL_FILES,
    SPOOL_NAME,
    TRAINING_FILES,
    hub_reason,
    is_permanent,
    publishes_training_state,
    stage,
    staged_checkpoints,
    staging_folder,
    step_of,
    upload,
)

RETRY_SECONDS = (60.0, 300.0, 900.0)  # after the first failure of an upload, the second, and each later one
LAST_RETRY_SECONDS = (5.0, 20.0)  # at the end of a run
FINISH_SECONDS = 300.0  # for all uploads at the end of a run


class HubUploads:
    """Uploads checkpoints while the run continues, and the final model. Without `push_to_hub` it does nothing.

    A staged checkpoint outlives pruning and the process: the next process of the run, or scripts/push_to_hub.py,
    uploads what is left. A newer checkpoint replaces those that still wait, unless all of them are wanted.
    """

    def __init__(
        self,
        config: TrainConfig,
        output_dir: Path,
        say: Callable[[str], None],
        repeat: str | None = None,
        keeps_all: bool = False,
    ) -> None:
        """say: prints a line. repeat: the command that repeats failed uploads. keeps_all: upload every checkpoint."""
        self.repeat = repeat or f"python scripts/push_to_hub.py {shlex.quote(str(output_dir))}"
        self.enabled = config.push_to_hub and PartialState().is_main_process
        self.config, self.output_dir, self.say = config, output_dir, say
        self.keeps_all = keeps_all or config.hub_strategy == "all_checkpoints"
        self.api = HfApi()
        self.running: tuple[Path, Future] | None = None
        self.failures: dict[str, str] = {}  # checkpoint -> why its last upload failed
        self.skipped: list[str] = []  # checkpoints that a newer one replaced
        self.num_failures, self.retry_at = 0, 0.0  # in a row
        self.url: str | None = None
        self.any_waiting = True  # an earlier process of the run may have left some
        self.gives_up_at, self.is_stuck = math.inf, False

    def add(self, checkpoint: Path, step: int) -> None:
        """Stage a complete checkpoint for its upload. Any thread can call this."""
        if not self.enabled or self.config.hub_strategy == "end":
            return
        folder, running = staging_folder(self.config, self.output_dir, step), self.running
        if running is not None and running[0] == folder:  # a schedule that changes saves the same step again
            with contextlib.suppress(FutureTimeoutError):
                running[1].exception(FINISH_SECONDS)
        stage(checkpoint, folder, MODEL_FILES + (TRAINING_FILES if publishes_training_state(self.config) else ()))
        self.any_waiting = True

    def advance(self) -> None:
        """Start the next upload if none is running. Call it after each step; it never waits."""
        if not (self.enabled and (self.any_waiting or self.running)) or (self.running and not self.running[1].done()):
            return
        self._collect()
        if time.monotonic() >= self.retry_at:
            self.any_waiting = False  # before it looks, because `add` may come in between
            if waiting := self._waiting():
                self._start(*waiting[0])

    def finish(self, final_step: int | None = None, seconds: float = FINISH_SECONDS) -> bool:
        """Upload what is left, and say where it is, or how to repeat what failed. The end of a run waits for this.

        final_step: of the final model in output_dir, which is uploaded too; None if the run stopped before its end.
        seconds: give up after this time. Returns whether everything is on the Hub.
        """
        if not self.enabled:
            return True
        self.gives_up_at = time.monotonic() + seconds
        if self.running or self.any_waiting or final_step is not None:
            limit = "" if seconds == math.inf else f", for at most {seconds:.0f} s"
            self.say(f"uploading to {self.config.hub_model_id}{limit}")
        self._collect()
        waiting, pauses = self._waiting(), [*LAST_RETRY_SECONDS, None]
        if final_step is not None:
            try:
                final = self.output_dir / SPOOL_NAME / FINAL_NAME
                stage(self.output_dir, final, MODEL_FILES)
                waiting.append((final, final_step))
            except OSError as error:  # a full disk, on a file system without links
                self.failures[FINAL_NAME] = short_reason(error)
        for folder, step in waiting:
            for pause in pauses:
                if self.is_stuck or time.monotonic() >= self.gives_up_at:
                    self.failures[folder.name] = f"not finished within {seconds:.0f} s"
                    break
                self._start(folder, step)
                error = self._collect()
                if error is None or is_permanent(error):
                    break
                if pause is None:
                    pauses = [None]  # the Hub is away: try the others once
                else:
                    time.sleep(pause)
        self._report()
        return not self.failures and not self.skipped

    def exit(self, code: int) -> NoReturn:
        """End the process, also while an upload hangs: the threads of the Hub's client would keep it alive."""
        if self.is_stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)

    def _report(self) -> None:
        """Say where the uploads are, and how to repeat those that are missing."""
        pruned = [name for name in self.skipped if not checkpoint_dir(self.output_dir, step_of(name)).is_dir()]
        reasons = dict.fromkeys(self.skipped, "a newer one was due") | self.failures
        reasons = {name: reason for name, reason in reasons.items() if name not in pruned}
        if self.url is not None:
            self.say(f"{'partly ' * bool(reasons)}published at {self.url}")
        for reason in dict.fromkeys(reasons.values()):
            names = [name for name in reasons if reasons[name] == reason]
            shown = names if len(names) < 5 else [*names[:2], f"{len(names) - 3} more", names[-1]]
            self.say(f"not uploaded: {', '.join(shown)} ({reason})")
        if reasons:
            self.say(f"to upload what is missing:\n    {self.repeat}")
        if pruned:
            reason = "replaced by newer ones before their upload, and deleted by --save_total_limit"
            self.say(f"{len(pruned)} checkpoints were {reason}; --hub_strategy all_checkpoints uploads all")

    def _seconds_left(self) -> float | None:
        return None if self.gives_up_at == math.inf else max(0.0, self.gives_up_at - time.monotonic())

    def _waiting(self) -> list[tuple[Path, int]]:
        """Return the staged checkpoints and their steps, oldest first, without those that a newer one replaces."""
        waiting = staged_checkpoints(self.output_dir)
        if not self.keeps_all:
            for folder, _ in waiting[:-1]:
                self.skipped.append(folder.name)
                self.failures.pop(folder.name, None)
                shutil.rmtree(folder, ignore_errors=True)
            del waiting[:-1]
        elif self.config.hub_strategy == "checkpoint":  # only the newest state is published
            for path in (folder / name for folder, _ in waiting[:-1] for name in TRAINING_FILES):
                path.unlink(missing_ok=True)
        return waiting

    def _start(self, folder: Path, step: int) -> None:
        use_xet = folder.name not in self.failures
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(upload(self.api, self.config, self.output_dir, folder, step, use_xet))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # Python would wait for a pool's thread when it exits
        self.running = folder, future

    def _collect(self) -> Exception | None:
        """Wait for the running upload, if there is one. Returns the error if it failed."""
        if self.running is None:
            return None
        (folder, future), self.running = self.running, None
        self.any_waiting = True
        try:
            error = future.exception(self._seconds_left())
        except FutureTimeoutError as timeout:
            self.is_stuck = True  # the client's connection hangs, and cannot be ended
            self.failures[folder.name] = "the connection to the Hub hangs"
            return timeout
        if error is None:
            self.url = future.result()
            self.failures.pop(folder.name, None)
            self.num_failures = 0
            return None
        if folder.name not in self.failures:
            self.say(f"warning: the upload of {folder.name} failed and will be repeated: {hub_reason(error)}")
        self.failures[folder.name] = hub_reason(error)
        self.retry_at = time.monotonic() + RETRY_SECONDS[min(self.num_failures, len(RETRY_SECONDS) - 1)]
        self.num_failures += 1
        return error
