"""Numbers about a step: FLOPs, throughput, MFU, memory."""

import re
import resource
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Dense bf16 (fp16 on V100 and T4) TFLOP/s with fp32 accumulation, from NVIDIA's data sheets, which quote most of them
# with sparsity: half of that. The first name that matches counts, so longer names come first.
PEAK_TFLOPS = (
    ("GB300", 2500),
    ("GB200", 2500),
    ("B300", 2250),
    ("B200", 2250),
    ("H200 NVL", 835),
    ("GH200", 989),
    ("H200", 989),
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 989),
    ("H800 PCIe", 756),
    ("H800", 989),
    ("H20", 148),
    ("A100", 312),
    ("A800", 312),
    ("A40", 150),
    ("A30", 165),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("A10G", 70),
    ("A10", 125),
    ("RTX 6000 Ada", 364),
    ("RTX A6000", 155),
    ("RTX 5090", 209),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
    ("V100", 125),
    ("T4", 65),
)


def count_flops_per_token(model_config: PreTrainedConfig, num_parameters: int, block_size: int) -> int:
    """Training FLOPs per token, forward and backward: 6 (N - wpe) + 12 L d T (PaLM, appendix B; nanoGPT).

    num_parameters: of the model as trained. block_size: T, the tokens in a row. 124M at T = 1024: 6 * 123.7 M +
    12 * 12 * 768 * 1024 = 855 M. Untied input embeddings are looked up, not multiplied, so they do not count; tied
    ones are the output's matrix.
    """
    lookups = model_config.n_positions * model_config.n_embd
    if not model_config.tie_word_embeddings:
        lookups += model_config.vocab_size * model_config.n_embd
    attention = 12 * model_config.n_layer * model_config.n_embd * block_size
    return 6 * (num_parameters - lookups) + attention


def count_parameters(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def peak_flops_per_second(device: torch.device) -> float | None:
    """The data sheet's rate of the device, or None where there is none to compare with."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was in use at once: of PyTorch's tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # Linux: ru_maxrss would begin with what the parent had
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
