"""Find where the time of a step goes: trace a few steps, and add up their kernels by kind of work.

The trace is in the run's folder; Perfetto and chrome://tracing show it. Times are in milliseconds per step.
"""

import re
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from recipe.config import TrainConfig
from recipe.hardware.devices import PLAIN_ATTENTION, find_attention_kernel
from recipe.rules import PROFILED_STEPS

TRACE_NAME = "trace.json.gz"

# Kinds of work by the names of GPU kernels, ATen operators and inductor's fused kernels. The first match counts.
KINDS = {
    "communication": r"nccl|c10d::",
    "data": r"DataLoader|memcpy htod",
    "optimizer": r"adam|optimizer|foreach|multi_tensor|vector_norm|lpnorm",
    "loss": r"log_?softmax|nll_loss|cross_entropy",
    "attention": r"scaled_dot_product|flash|fmha|sdpa|softmax",
    "matmul": r"::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear)\b|mkldnn.*linear|gemm|nvjet|cutlass|cublas|triton_tem",
    "elementwise": r"^aten::|cpp_fused|triton_|kernel|memcpy|memset",
}
IDLE = "idle"  # no kernel runs: the host works, launches or waits


def kind_of(name: str) -> str | None:
    """Return the kind of work of a kernel or operator; None for what does no work, such as a region around others."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), None)


class StepProfiler:
    """Profiles `PROFILED_STEPS` steps of one process, once."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, output_dir: Path, first_step: int) -> None:
        """Create it before the first forward pass, which compiles. A run that ends earlier is not profiled."""
        self.after_step = first_step + config.profile if config.profile and accelerator.is_main_process else None
        self.device, self.output_dir = accelerator.device, output_dir
        self.profile: profile | None = None
        self.set_schedule(config)
        if self.after_step is not None and self.device.type == "cpu":
            import torch._inductor.config

            torch._inductor.config.cpp.enable_kernel_profile = True  # gives its kernels names in a trace

    def set_schedule(self, config: TrainConfig) -> None:
        """Profile nothing if the run ends too early for it."""
        if self.after_step is not None and self.after_step + PROFILED_STEPS > config.max_steps:
            self.after_step = None
            if self.profile is not None:
                self.profile.stop()

    def after(self, step: int) -> dict[str, Any] | None:
        """Call this after each step. Returns `summarize`'s numbers after the last profiled step."""
        if self.after_step is None or step not in (self.after_step, self.after_step + PROFILED_STEPS):
            return None
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        if self.profile is None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self.profile = profile(activities=activities)
            self.profile.start()
            self.started_at = time.perf_counter()
            return None
        seconds = time.perf_counter() - self.started_at
        self.profile.stop()
        trace, self.profile = self.profile, None
        trace.export_chrome_trace(str(self.output_dir / TRACE_NAME))
        return summarize(trace.events(), seconds, self.device)


def summarize(events: Any, seconds: float, device: torch.device) -> dict[str, Any]:
    """Return milliseconds per step by kind of work, each counted once, and the attention kernel that ran.

    events: the profiler's, of `PROFILED_STEPS` steps that took `seconds`. On a GPU this counts
    the time of kernels; on a CPU, each operator's self time. Operators that the optimizer calls count as optimizer.
    """
    milliseconds = dict.fromkeys(KINDS, 0.0)
    for event in events:
        if device.type == "cuda":
            kind = kind_of(event.name)
            is_kernel = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
            own_us = event.self_device_time_total if is_kernel else 0
        else:
            kind = "optimizer" if _is_optimizers(event) else kind_of(event.name)
            own_us = event.self_cpu_time_total
        if kind is not None:
            milliseconds[kind] += own_us / 1e3 / PROFILED_STEPS
    step_ms = seconds * 1e3 / PROFILED_STEPS
    milliseconds[IDLE] = max(0.0, step_ms - sum(milliseconds.values()))
    kernel = find_attention_kernel({event.name for event in events})
    by_kind = {f"{kind}_ms": value for kind, value in milliseconds.items()}
    return {"step_ms": step_ms, "attention_kernel": kernel, **by_kind}


def _is_optimizers(event: Any) -> bool:
    while event is not None and not event.name.startswith("Optimizer.step"):
        event = event.cpu_parent
    return event is not None


def describe(numbers: dict[str, Any]) -> str:
    """Format the numbers of `summarize` as a small table."""
    kernel = numbers["attention_kernel"]
    note = ", counted as matmul" if kernel == PLAIN_ATTENTION else ""
    lines = [f"one step takes {numbers['step_ms']:,.1f} ms (attention: {kernel}{note}):"]
    for kind in (*KINDS, IDLE):
        share = numbers[f"{kind}_ms"] / numbers["step_ms"]
        lines.append(f"  {kind:14}{numbers[f'{kind}_ms']:>10,.1f} ms {share:>5.0%}")
    return "\n".join(lines)
