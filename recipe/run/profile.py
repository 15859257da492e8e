"""Find where the time of a step goes: PyTorch's profiler over three steps.

The trace is in the run's folder; Perfetto and chrome://tracing show it.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile, schedule

PROFILED_STEPS = 3
TRACE_NAME = "trace.json.gz"


def build_profiler(after: int | None, accelerator: Accelerator, output_dir: Path, say: Callable[[str], None]):
    """Return a context manager whose value is None, or a profiler that wants its `step` called after every step.

    It profiles the main process. after: steps before; None for no profile. say: prints the table of operators.
    """
    device = accelerator.device
    if after is None or not accelerator.is_main_process:
        return contextlib.nullcontext()
    if device.type == "cpu":
        import torch._inductor.config

        torch._inductor.config.cpp.enable_kernel_profile = True  # gives its kernels names in a trace

    def show(found: profile) -> None:
        found.export_chrome_trace(str(output_dir / TRACE_NAME))
        key = f"self_{'cuda' if device.type == 'cuda' else 'cpu'}_time_total"
        table = found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=30)
        say(f"{table}\nat most {PROFILED_STEPS} steps; trace: {output_dir / TRACE_NAME}")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    periods = schedule(wait=max(0, after - 1), warmup=min(1, after), active=PROFILED_STEPS, repeat=1)
    return profile(activities=activities, schedule=periods, on_trace_ready=show)
