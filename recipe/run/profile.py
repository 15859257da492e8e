"""--profile: what three steps of the run are made of."""

import contextlib

import torch
from accelerate.utils import ProfileKwargs

from recipe.run.decide import Run
from recipe.run.log import RunLog

PROFILED_STEPS = 3
TRACE_NAME = "trace.json.gz"


def build_profiler(run: Run, log: RunLog) -> contextlib.AbstractContextManager:
    """Return a context manager whose value is None, or a profiler that wants its `step` called after every step.

    It profiles three steps of the main process, and writes a trace for Perfetto and chrome://tracing into the run's
    folder. Writing takes seconds, which do not count in the speed.
    """
    after = run.config.profile
    accelerator = log.accelerator
    if after is None or not accelerator.is_main_process:
        return contextlib.nullcontext()

    def show(profile: torch.profiler.profile) -> None:
        with log.paused():
            profile.export_chrome_trace(str(log.output_dir / TRACE_NAME))
            key = "self_cuda_time_total" if accelerator.device.type == "cuda" else "self_cpu_time_total"
            table = profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=30)
            log.say(f"{table}\nat most {PROFILED_STEPS} steps; trace: {log.output_dir / TRACE_NAME}")

    periods = {"wait": after - 1, "warmup": 1, "active": PROFILED_STEPS, "repeat": 1}
    return accelerator.profile(ProfileKwargs(schedule_option=periods, on_trace_ready=show))
