"""Watch a run: sample its GPU, and recognize in the log lines what slows or endangers it."""

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from recipe.config import TrainConfig
from recipe.optim.schedule import count_warmup_steps

SAMPLE_SECONDS = 1.0  # NVML itself averages the utilization over 1/6 s to 1 s

# A problem is reported once it has lasted this long: most compilations, saves and backups are over by then.
LINES, SECONDS = 3, 60.0
REPEAT_AFTER = 50  # log lines without the problem before it is reported again; one that comes and goes is one problem

WAITING = 0.1  # of the time; fetching rows of a prepared dataset takes less than 0.01 of the demo's
UTILIZATION = 0.5  # kernels of training follow each other without gaps
MEMORY = 0.95  # above it, fragmentation alone may exhaust the memory
SLOW, LAPS, FEWEST_LAPS = 0.8, 100, 10  # below 0.8 of the median of the 100 laps before, at least 10
# The norm rises if the median of each of four groups of ten log lines is 1.3 times the one before, 2.2 times in total.
# Noise and single spikes move these medians up and down, but not up three times in a row.
GROUP, NUM_GROUPS, RISE = 10, 4, 1.3


@dataclass
class Problem:
    """How long a problem has lasted, and how long it has been absent."""

    lines: int = 0
    seconds: float = 0.0
    lines_absent: int = REPEAT_AFTER

    def is_due(self, present: bool, seconds: float) -> bool:
        """Return whether to report the problem. seconds: of training since the last log line."""
        if not present:
            self.lines, self.seconds, self.lines_absent = 0, 0.0, self.lines_absent + 1
            return False
        self.lines, self.seconds = self.lines + 1, self.seconds + seconds
        if self.lines < LINES or self.seconds < SECONDS:
            return False
        is_new, self.lines_absent = self.lines_absent >= REPEAT_AFTER, 0
        return is_new


class Watch:
    """Turns log lines into warnings, each with a remedy."""

    def __init__(self, config: TrainConfig) -> None:
        self.set_schedule(config)
        self.problems: dict[str, Problem] = {}
        self.train_seconds: float | None = None
        self.rates: deque[float] = deque(maxlen=LAPS)
        self.norms: deque[float] = deque(maxlen=GROUP * NUM_GROUPS)

    def set_schedule(self, config: TrainConfig) -> None:
        self.config, self.warmup_steps = config, count_warmup_steps(config)

    def check(self, step: int, values: dict[str, Any]) -> dict[str, str]:
        """Return {kind: warning} of what is to be reported now. values: of the log line.

        The first line of a process is skipped, because it includes compilation.
        """
        before, self.train_seconds = self.train_seconds, values["train_seconds"]
        if before is None:
            return {}
        found = {
            "waiting_for_data": self._waiting_for_data(values["share_waiting_for_data"]),
            "low_utilization": self._low_utilization(values.get("gpu_utilization")),
            "memory": self._memory(values["share_of_memory"]),
            "throughput": self._throughput(values["tokens_per_second"]),
            "gradient_norm": self._gradient_norm(step, values["grad_norm"]),
        }
        seconds = values["train_seconds"] - before
        return {
            kind: text
            for kind, text in found.items()
            if self.problems.setdefault(kind, Problem()).is_due(text is not None, seconds)
        }

    def _waiting_for_data(self, share: float | None) -> str | None:
        if share is None or share < WAITING:
            return None
        if self.config.streaming:
            remedy = "prepare the text first (scripts/prepare_data.py) and train on it with --dataset_dir"
        elif self.config.data_placement == "mmap":
            remedy = (
                "read the rows from memory with --data_placement ram, or in advance with --dataloader_num_workers 2"
            )
        else:
            remedy = "build the batches in advance with --dataloader_num_workers 2"
        return f"the device waits for data {share:.0%} of the time; {remedy}"

    def _low_utilization(self, utilization: float | None) -> str | None:
        if utilization is None or utilization >= UTILIZATION:
            return None
        return (
            f"the GPU is busy only {utilization:.0%} of the time; try a larger --per_device_train_batch_size or "
            "--dynamo_backend inductor, and look with --profile for what it waits for"
        )

    def _memory(self, share: float) -> str | None:
        if share < MEMORY:
            return None
        return (
            f"{share:.0%} of the memory is in use; to leave more room, resume with "
            "--loss_chunks 8, --activation_checkpointing true or a smaller --per_device_train_batch_size"
        )

    def _throughput(self, rate: float) -> str | None:
        median = statistics.median(self.rates) if len(self.rates) >= FEWEST_LAPS else 0.0
        self.rates.append(rate)
        if rate >= SLOW * median:
            return None
        return (
            f"throughput fell from {median:,.0f} to {rate:,.0f} tokens/s; look for other programs on this machine and "
            "for a GPU that is too hot or limited (nvidia-smi -q -d PERFORMANCE)"
        )

    def _gradient_norm(self, step: int, norm: float) -> str | None:
        if step > self.warmup_steps and math.isfinite(norm):
            self.norms.append(norm)
        if len(self.norms) < GROUP * NUM_GROUPS:
            return None
        norms = list(self.norms)
        medians = [statistics.median(norms[start : start + GROUP]) for start in range(0, len(norms), GROUP)]
        if any(after < RISE * before for before, after in zip(medians, medians[1:], strict=False)):
            return None
        return (
            f"the gradient norm keeps rising, from {medians[0]:.3g} to {medians[-1]:.3g} over {len(norms)} log lines; "
            "if the loss rises as well, resume from an earlier checkpoint with a lower --learning_rate and "
            "--change_schedule, or start again with --spike_sigmas 6, which skips outliers"
        )


# Each reading of a GPU: its name in the log line, and the query.
READINGS = {
    "gpu_utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "gpu_memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu_power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu_temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
}


class GpuSampler:
    """Samples the run's GPU in a thread, through NVML and without CUDA, until it is closed.

    It requires the optional nvidia-ml-py and NVIDIA's driver. Without them, and on other devices, it samples nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.samples: deque[dict[str, float]] = deque(maxlen=3600)
        self.errors: deque[str] = deque()  # each kind once, to be reported by the main thread
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        # NVML numbers all GPUs of the machine, torch those in CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.thread = threading.Thread(target=self._sample, args=(pynvml, uuid), daemon=True, name="gpu-sampler")
        self.thread.start()

    def _sample(self, nvml: Any, uuid: str) -> None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver, or one without NVML
            return
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:  # for example a part of a GPU (MIG)
            self.errors.append(f"NVML does not know this run's GPU ({error})")
            return
        failed = set()
        while not self.closed.wait(SAMPLE_SECONDS):
            sample = {}
            for name, read in READINGS.items():
                try:
                    sample[name] = read(nvml, gpu)
                except nvml.NVMLError as error:  # not supported by this GPU, or the driver is busy
                    if name not in failed:
                        failed.add(name)
                        self.errors.append(f"NVML could not read {name} ({error})")
            self.samples.append(sample)

    def means(self) -> dict[str, float]:
        """Return the mean of each reading since the last call, without those that have none."""
        samples = [self.samples.popleft() for _ in range(len(self.samples))]
        values = {name: [sample[name] for sample in samples if name in sample] for name in READINGS}
        return {name: statistics.fmean(numbers) for name, numbers in values.items() if numbers}

    def close(self) -> None:
        """Let the thread end."""
        self.closed.set()
