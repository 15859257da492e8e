"""Numbers about a step: FLOPs, throughput, MFU, memory."""

import time


class Throughput:
    """Tokens per second of training alone: evaluation and saving stop the clock.

    Read it only where the host has just waited for the device, or it measures how fast work is queued.
    """

    def __init__(self) -> None:
        self.laps: list[tuple[int, float]] = []  # tokens and seconds of each
        self.created_at = self.started_at = time.perf_counter()

    @property
    def share_outside_training(self) -> float:
        """Of the time since this was created: what evaluating, saving and the like took."""
        elapsed = time.perf_counter() - self.created_at
        return max(0.0, 1 - sum(seconds for _, seconds in self.laps) / elapsed)

    def resume(self) -> None:
        """Start the clock again after something that was not training."""
        self.started_at = time.perf_counter()

    def lap(self, tokens: int) -> float:
        """Seconds since the last lap or resume, in which `tokens` were trained on."""
        now = time.perf_counter()
        seconds, self.started_at = now - self.started_at, now
        self.laps.append((tokens, seconds))
        return seconds

    @property
    def tokens_per_second(self) -> float:
        """Over all laps but the first, which holds compilation and warm-up, unless there is no other."""
        tokens, seconds = map(sum, zip(*(self.laps[1:] or self.laps), strict=True)) if self.laps else (0, 0.0)
        return tokens / seconds if seconds else 0.0
