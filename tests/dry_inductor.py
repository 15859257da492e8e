"""What inductor generates for an H100, run without kernels: the allocations happen, the kernels are recorded.

It requires a build of torch with CUDA, and no GPU.
"""

import ast
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

STREAM = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), stream_id=0, device_index=0, device_type=1)
CUDA_ANSWERS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda *_: (9, 0),
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "current_stream": lambda *_: STREAM,
    "_exchange_device": lambda _: 0,
    "_maybe_exchange_device": lambda _: 0,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
}


def nothing(*_, **__) -> None:
    pass


def empty_strided_cuda(size: tuple, stride: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def reinterpret_tensor(tensor: torch.Tensor, size: tuple, stride: tuple, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class Recorder:
    """Stands for `AsyncCompile` and `extern_kernels` in the generated code. record: `AbsentGpu.record`."""

    def __init__(self, record: Callable) -> None:
        self.record = record

    def __call__(self) -> "Recorder":
        return self

    def wakeup(self) -> None:
        pass

    def use_process_pool(self) -> bool:
        return False

    def wait(self, scope: dict) -> None:
        pass

    def triton(self, name: str, source: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda *args, **__: self.record(name, *find_accesses(source, args)))

    def __getattr__(self, name: str) -> Callable:  # extern_kernels.mm(...)
        return lambda *args, out, **_: self.record(name, args, [out])


def find_accesses(source: str, args: tuple) -> tuple[list, list, int]:
    """Return the tensors that a Triton kernel reads, those that it writes, and its number of elements.

    An atomic addition reads and writes. Of a larger tensor, such as an embedding matrix, the kernel touches no more
    than its number of elements. `kernel_num_gb` in the source leaves out additions and workspaces (torch 2.15).
    """
    names = ast.literal_eval(re.search(r"'signature': (\{.*?\})", source)[1])
    read, written = [], []
    for name, tensor in zip(names, args, strict=False):
        if isinstance(tensor, torch.Tensor):
            accesses = set(re.findall(rf"tl\.(load|store|atomic_add)\({name} \+", source))
            read += [tensor] * bool(accesses & {"load", "atomic_add"})
            written += [tensor] * bool(accesses & {"store", "atomic_add"})
    sizes = re.findall(r"^    [xyzr]\w*numel\w* = (\d+)$", source, re.MULTILINE)
    return read, written, math.prod(map(int, sizes))


@contextlib.contextmanager
def dry_inductor(record: Callable, properties: SimpleNamespace) -> Iterator[None]:
    """Let inductor compile for a GPU with these properties, and record the kernels that its code calls.

    record: `AbsentGpu.record`.
    """
    recorder = Recorder(record)
    with contextlib.ExitStack() as stack:
        for name, answer in {**CUDA_ANSWERS, "get_device_properties": lambda *_: properties}.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
            if hasattr(CudaInterface, name.lstrip("_")):
                stack.enter_context(mock.patch.object(CudaInterface, name.lstrip("_"), staticmethod(answer)))
        stack.enter_context(mock.patch.object(CudaInterface, "get_raw_stream", staticmethod(lambda *_: 0)))
        guards = "torch._C._dynamo.guards"
        for name, replacement in {
            "torch._inductor.async_compile.AsyncCompile": recorder,
            "torch._inductor.select_algorithm.extern_kernels": recorder,
            "torch._C._cuda_getCurrentRawStream": nothing,
            "torch.cuda._DeviceGuard": lambda _: contextlib.nullcontext(),
            f"{guards}._empty_strided_cuda": empty_strided_cuda,
            f"{guards}._reinterpret_tensor": reinterpret_tensor,
            f"{guards}.assert_size_stride": nothing,
            f"{guards}.assert_size_stride_grouped": nothing,
            f"{guards}.assert_alignment": nothing,
            f"{guards}.copy_if_misaligned": lambda tensor: tensor,
            "torch.utils._triton.triton_hash_with_backend": lambda: "sm_90",
            "torch.utils._triton.triton_backend": lambda: SimpleNamespace(hash=lambda: "sm_90"),
            "torch._inductor.codegen.triton.has_triton_package": lambda: True,
            "torch._subclasses.fake_tensor.init_gpu_context": nothing,
        }.items():
            stack.enter_context(mock.patch(name, replacement))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        options = {"force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False}
        stack.enter_context(inductor_config.patch(**options))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        yield
