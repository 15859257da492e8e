"""Check the device and the PyTorch build: driver, kernels, precision, attention, compiler."""

import os
import re
import subprocess
import sys
import tempfile

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from recipe.config import TrainConfig
from recipe.hardware.check import Finding
from recipe.hardware.choices import choose_attention, choose_dynamo_backend, choose_mixed_precision
from recipe.hardware.devices import PLAIN_ATTENTION, find_attention_kernel, native_bf16, why_no_inductor
from recipe.hardware.processes import check_kernels

BUILDS = "install a build for it from https://pytorch.org/get-started/locally"
# The oldest Linux driver of each CUDA release (NVIDIA, CUDA Compatibility, minor version compatibility).
FIRST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILE_SECONDS = 120.0  # to import PyTorch and compile the smallest graph on a slow machine
COMPILED_PROGRAM = "import sys, torch; torch.compile(lambda x: (2 * x).sin() + 1)(torch.ones(8, device=sys.argv[1]))"


def check_torch_build(torch_version: str, cuda: str | None, driver: str | None, available: bool) -> Finding:
    """Compare the CUDA release that PyTorch was built for with the NVIDIA driver.

    cuda: of the build, None for CPU and ROCm builds. driver: None without one. available: a GPU can be used.
    """
    found = (
        f"{torch_version}, {f'CUDA {cuda}' if cuda else 'no CUDA'}, {f'driver {driver}' if driver else 'no driver'}"
    )
    if driver is None or (cuda is None and available):  # ROCm, Apple silicon
        return Finding("ok", found)
    if cuda is None:
        return Finding("error", f"{found}: this build cannot use the NVIDIA GPU", BUILDS)
    release, installed = int(cuda.split(".")[0]), tuple(map(int, driver.split(".")[:2]))
    oldest = FIRST_DRIVERS.get(release, (0, 0))
    if installed < oldest and not available:  # data center GPUs may have NVIDIA's forward compatibility package
        remedy = f"install driver {'.'.join(map(str, oldest))} or newer, or a PyTorch build for an older CUDA"
        return Finding("error", f"{found}: the driver is too old", remedy)
    if not available:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden in ("", "-1"):
            return Finding("warning", f"{found}; CUDA_VISIBLE_DEVICES hides the GPU", "unset it to train on the GPU")
        return Finding("error", f"{found}, but PyTorch finds no GPU", "check that nvidia-smi works, then restart")
    return Finding("ok", found)


def check_gpu_kernels(name: str, capability: tuple[int, int], architectures: list[str]) -> Finding:
    """Find out whether the PyTorch build has kernels for the GPU, from `torch.cuda.get_arch_list()`.

    `sm_80` runs on 8.0 and later minor versions, `sm_90a` on 9.0 only; `compute_90` is PTX, which the driver compiles
    for 9.0 and everything newer.
    """
    found, matches = f"{name} (sm_{capability[0]}{capability[1]})", set()
    for architecture in architectures:
        kind, digits, suffix = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", architecture).groups()
        built_for = divmod(int(digits), 10)
        is_newer = built_for <= capability and (kind == "compute" or built_for[0] == capability[0])
        if built_for == capability or (is_newer and suffix != "a"):
            matches.add(kind)
    if not matches:
        return Finding("error", f"{found}; this build has kernels for {', '.join(architectures) or 'none'}", BUILDS)
    if "sm" not in matches:
        return Finding("warning", f"{found}: its driver compiles the kernels from PTX at first use", BUILDS)
    return Finding("ok", found)


def check_device(device: torch.device) -> Finding:
    """Name the device that trains, and run a kernel on it."""
    if device.type != "cuda":
        return Finding("ok", f"not used; the run trains on {device.type}")
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    finding = Finding("warning", f"{name}: ROCm builds have not been tried")
    if torch.version.hip is None:
        finding = check_gpu_kernels(name, torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    if finding.status != "error":
        check_kernels(device)
    return finding


def check_precision(config: TrainConfig, device: torch.device) -> Finding:
    """Say which precision the run uses and why."""
    choice = choose_mixed_precision(config, device)
    if choice.value == "bf16" and native_bf16(device) is None:
        return Finding("warning", f"bf16, emulated: {choice.reason}", "pass --mixed_precision auto; bf16 is slow here")
    return Finding("ok", f"{choice.value}: {choice.reason}")


def check_tf32(config: TrainConfig, device: torch.device) -> Finding:
    """Say whether the matrix products that stay in fp32 use TF32."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return Finding("ok", "this GPU has none")
    return Finding("ok", "used for fp32 matrix products" if config.tf32 else "turned off by --tf32 false")


def check_cudnn() -> Finding:
    """Find cuDNN, which has the fastest attention on Hopper and newer."""
    number = torch.backends.cudnn.version()
    if number is None:
        return Finding("warning", "not found", "reinstall PyTorch; its CUDA builds include cuDNN")
    return Finding("ok", f"{number // 10000}.{number // 100 % 100}.{number % 100}")


class _Operators(TorchDispatchMode):
    """Records the names of the operators that reach the device, without a profiler's start-up and output."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def check_attention(config: TrainConfig, model_config: PreTrainedConfig, device: torch.device) -> Finding:
    """Run the attention of one layer, and name the kernel that sdpa chose for its shape and precision."""
    choice = choose_attention(config, device)
    heads, size = model_config.num_attention_heads, model_config.hidden_size // model_config.num_attention_heads
    shape = f"{config.block_size} tokens, head size {size}"
    if choice.value == "eager":
        return Finding("ok", f"{PLAIN_ATTENTION}, {shape}: {choice.reason}")
    dtype = DTYPES[choose_mixed_precision(config, device).value]
    q = torch.zeros(1, heads, config.block_size, size, dtype=dtype, device=device, requires_grad=True)
    with _Operators() as operators:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    kernel = find_attention_kernel(operators.names)
    if kernel in ("math", PLAIN_ATTENTION):
        return Finding("warning", f"{kernel}, {shape}: no flash kernel", "use a head size of 64 or 128, and bf16")
    return Finding("ok", f"{kernel}, {shape}")


def check_compiler(config: TrainConfig, device: torch.device, total_flops: float) -> Finding:
    """Compile a tiny graph with inductor in a fresh process, which needs a compiler and, on CUDA, Python's headers.

    total_flops: of the run, which decides whether it compiles. Raises `UserError` if it must but cannot.
    """
    choice = choose_dynamo_backend(config, device, total_flops)
    if device.type not in ("cuda", "cpu"):
        return Finding("ok", f"{choice.value}: {choice.reason}")
    if (why_not := why_no_inductor(device)) is not None:
        return Finding("warning", why_not, "install it (Debian: apt-get install g++ python3-dev)")
    status = "error" if choice.value == "inductor" else "warning"
    remedy = "pass --dynamo_backend no, which trains slower, or repair the compiler"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # scalar code; testing each vector extension takes ten seconds
        command = [sys.executable, "-c", COMPILED_PROGRAM, device.type]
        try:
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return Finding(status, f"a tiny graph did not compile in {COMPILE_SECONDS:.0f} s", remedy)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
            reason = (lines or error.stderr.splitlines() or ["no output"])[0][:200]
            return Finding(status, f"a tiny graph does not compile: {reason}", remedy)
    use = "is not compiled" if choice.value == "no" else f"uses {choice.value}"
    return Finding("ok", f"compiled a tiny graph; the run {use}: {choice.reason}")
