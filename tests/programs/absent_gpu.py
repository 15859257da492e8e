"""Whole runs of recipe/train.py on a GPU that is not there: fake CUDA tensors, no kernels.

python tests/programs/absent_gpu.py LIBRARY    LIBRARY: no_gpu.cpp, compiled.

Each line of its input is a run, and each line of its output what is known of it: the arguments and the result of
`rehearse`, in JSON, or those of `rehearse_as` on both machines. Operators on tensors of different devices raise an
error, as on a GPU.
"""

import contextlib
import ctypes
import functools
import io
import json
import multiprocessing
import os
import sys
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

if __name__ == "__main__":
    LIBRARY = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch asks for the hooks of CUDA

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recipe.train

CUDA, RECIPE, aten = torch.device("cuda", 0), str(Path(recipe.train.__file__).parent) + "/", torch.ops.aten
GB = 10**9
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * GB)
PINNED = weakref.WeakSet()  # storages on the CPU
ALLOCATION = 512  # bytes: torch's allocator rounds up to a multiple


class AbsentGpu(TorchDispatchMode):
    """Tensors on the CPU are real, and those on the GPU are fake; what the host reads of them are ones.

    Counts the bytes of live storages on the GPU, and notes when the host waits for it. waits: (step, function of the
    recipe, such as "run/log.py train"); step: optimizer steps done, or -1 before the loop.
    """

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        super().__init__()
        self.limit_bytes, self.live_bytes, self.peak_bytes = limit_bytes, 0, 0
        self.sizes, self.step, self.waits = weakref.WeakKeyDictionary(), -1, []  # sizes: of storages, in bytes
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") becomes a copy from the CPU
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    @classmethod
    def is_infra_mode(cls) -> bool:  # dynamo compiles under it
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, DTensor) for t in tensors):
            return NotImplemented  # it calls the operators on what it holds
        on_gpu = any(t.is_cuda for t in tensors)
        if not on_gpu and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return function(*args, **kwargs)
        if function is aten._fused_adamw_.tensor_lr:  # has no fake version (torch 2.11 to 2.15)
            assert {t.device for t in tensors} == {CUDA}, "fused AdamW requires all tensors on the GPU"
            return None
        if self.host_waits(function, args, kwargs):
            self.wait()
        if function is aten._local_scalar_dense.default:
            return read(args[0]).item()
        with self.fake:
            result = function(*args, **kwargs)
        if function is aten.copy_.default and not args[0].is_cuda:
            return args[0].copy_(read(args[1]))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self.count(tensor)
        if isinstance(result, torch.Tensor) and on_gpu and not result.is_cuda:
            return read(result)
        return result

    def host_waits(self, function, args: tuple, kwargs: dict) -> bool:
        """Return whether the host waits for the GPU in this operator; see `torch.cuda.set_sync_debug_mode`."""
        if function is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            return self.copy_waits(args[0], target, kwargs.get("non_blocking", False))
        if function is aten.copy_.default:
            return self.copy_waits(args[1], args[0].device, args[2] if len(args) > 2 else False)
        if function in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
            # A mask is counted on the host; indices in host memory are copied.
            return any(t is not None and (t.dtype == torch.bool or not t.is_cuda) for t in args[1])
        return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags})

    def copy_waits(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> bool:
        if source.device.type == target.type:
            return False
        return source.is_cuda or not (non_blocking and source.untyped_storage() in PINNED)

    def wait(self, *_) -> None:
        self.waits.append((self.step, find_caller()))

    def decide_turn(self, run, state, stop, decide=recipe.train.decide_turn) -> object:
        """Stand for the first thing that the loop does in each turn."""
        self.step = state.step
        return decide(run, state, stop)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        if storage not in self.sizes:
            self.sizes[storage] = size = [0]
            weakref.finalize(storage, self.resize, size, 0)
            self.resize(size, storage.nbytes())

    def resize(self, size: list[int], num_bytes: int) -> None:
        """size: the only item is what is counted of a storage."""
        rounded = -(-num_bytes // ALLOCATION) * ALLOCATION
        if self.live_bytes + rounded - size[0] > self.limit_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.live_bytes += rounded - size[0]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        size[0] = rounded

    def reset_peak(self, *_) -> None:
        """Forget set-up and trial step: the model is built on the GPU, whole."""
        self.peak_bytes = self.live_bytes

    def resize_storage(self, storage, num_bytes: int, resize=torch.UntypedStorage.resize_):
        """Stand for `UntypedStorage.resize_`, with which FSDP frees what it has gathered."""
        if storage in self.sizes:
            self.resize(self.sizes[storage], num_bytes)
        return resize(storage, num_bytes)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the host reads of a tensor on the GPU: ones, which are finite, and yes to every question."""
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def find_caller() -> str:
    """Return the innermost function of the recipe that has a name, as "run/log.py train"."""
    frame = sys._getframe()
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(RECIPE) and not name.startswith("<"):
            return f"{file.removeprefix(RECIPE)} {name}"
        frame = frame.f_back
    return "outside the recipe"


# ------------------------------------------------------------------ what PyTorch would ask the GPU


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Call the kernel that sdpa takes on an H100, as far as memory goes: flash, or efficient attention in fp32."""
    assert attn_mask is None and (is_causal or query.shape[2] == 1), "a mask rules out flash attention"
    if query.dtype == torch.float32:
        if not torch.backends.cuda.mem_efficient_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


def on_the_gpu(function):
    """Create what `function` creates on the GPU: fake parameters cannot be moved there."""

    def build(*args, **kwargs):
        with CUDA:
            return function(*args, **kwargs)

    return build


def start_on_the_gpu(start_processes=recipe.run.start.start_processes) -> object:
    sharding = start_processes()
    os.environ.pop("ACCELERATE_USE_CPU", None)  # which has connected the processes by gloo
    PartialState().device = CUDA
    if PartialState().num_processes > 1:
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return sharding


class DataParallel(torch.nn.parallel.DistributedDataParallel):
    """Reduces nothing: fake gradients are those of all processes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, reduce_nothing)
        self.reducer = mock.Mock(wraps=self.reducer)
        self.reducer.prepare_for_forward.return_value = None  # starts a timer of the GPU
        self.reducer._rebuild_buckets.return_value = False  # in an order that process 0 would send
        self.kept, self.logger = self.logger, mock.Mock()  # it requires a timer


def reduce_nothing(_state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Stand for `Tensor.pin_memory`, which the DataLoader calls in a thread, where no mode is active."""
    if tensor.untyped_storage() not in PINNED:
        tensor = tensor.clone()
        PINNED.add(tensor.untyped_storage())
    return tensor


class Generator(torch.Generator):
    def __new__(cls, device=None):
        return super().__new__(cls)


ANSWERS = {
    "torch.cuda.set_device": lambda *_: None,
    "torch.cuda.current_device": lambda: 0,
    # Streams and events of any accelerator, which ask the device of no_gpu.cpp. A stream is its own context.
    "torch.cuda.Stream": torch.Stream,
    "torch.cuda.Event": torch.Event,
    "torch.cuda.stream": lambda stream: stream,
    "torch.cuda.current_stream": torch.accelerator.current_stream,
    "recipe.run.start.start_processes": start_on_the_gpu,
    "recipe.model.build.check_model": lambda *_: None,  # needs numbers, which no tensor has here
    "recipe.model.build.have_equal_logits": lambda *_: True,
    "recipe.train.build_model": on_the_gpu(recipe.train.build_model),
    "recipe.train.LanguageModelingLoss": on_the_gpu(recipe.train.LanguageModelingLoss),
    "torch.nn.Module.to": lambda self, *_, **__: self,
    "torch.nn.functional.scaled_dot_product_attention": attend,
    "torch.nn.parallel.DistributedDataParallel": DataParallel,
    "torch.nn.parallel.distributed._verify_param_shape_across_processes": lambda *_: None,
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
    "accelerate.accelerator.is_bf16_available": lambda *_: True,
    "torch.Generator": Generator,
    "torch.Tensor.pin_memory": pin,
    "torch.cuda._lazy_init": lambda: None,
    "torch.backends.cudnn.version": lambda: 92600,
    "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *_: None,
    "torch.cuda.get_device_name": lambda *_: H100.name,
    "torch.cuda.get_device_properties": lambda *_: H100,
    "torch.cuda.memory_reserved": lambda *_: 0,
    "torch.cuda.memory_allocated": lambda *_: GB // 2,
    "torch.cuda.max_memory_allocated": lambda *_: GB,
    "torch._subclasses.fake_tensor.FakeTensor.tolist": lambda self: self.cpu().tolist(),  # its own: item by item
    "torch.accelerator.empty_cache": lambda *_: None,
    "torch.accelerator.is_available": lambda: True,
}


def rehearse(argv: list[str], free_bytes: float = 80 * GB, limit_bytes: float = float("inf")) -> dict:
    """Run main() with the options argv. free_bytes: what the GPU reports; limit_bytes: where it runs out.

    Returns waits and peak_bytes of `AbsentGpu`, the output, and the traceback if the run failed.
    """
    gpu, output, failed = AbsentGpu(limit_bytes), io.StringIO(), None
    answers = {
        **ANSWERS,
        "recipe.train.decide_turn": gpu.decide_turn,
        "torch.cuda.mem_get_info": lambda *_: (free_bytes, free_bytes),
        "torch.UntypedStorage.resize_": lambda storage, num_bytes: gpu.resize_storage(storage, num_bytes),  # noqa: PLW0108
        "torch.cuda.reset_peak_memory_stats": gpu.reset_peak,
        "torch.cuda.synchronize": gpu.wait,
        "torch.accelerator.synchronize": gpu.wait,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch("sys.argv", ["recipe/train.py", *argv]))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        stack.enter_context(gpu)
        try:
            recipe.train.main()
        except BaseException:
            failed = traceback.format_exc()
    return {"waits": gpu.waits, "peak_bytes": gpu.peak_bytes, "output": output.getvalue(), "failed": failed}


def rehearse_sharded(argv: list[str], num_processes: int, **limits: float) -> dict:
    """Rehearse the first of the processes of an FSDP run. The others are not there, nor are their hosts."""
    launched = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    dist.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    alone = functools.cache(lambda *_: None)
    try:
        with mock.patch.dict(os.environ, launched), mock.patch("recipe.hardware.processes.host_group", alone):
            return rehearse(argv, **limits)
    finally:
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()


def rehearse_as(rank: int, port: int, argv: list[str]) -> dict:
    """Rehearse the run of one of two machines, whose hosts are connected."""
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return rehearse(argv)


if __name__ == "__main__":
    LIBRARY.install()
    del __file__  # the processes that a run spawns would import it, and with it all of the recipe
    for line in sys.stdin:
        case = json.loads(line)
        if "port" in case:  # the first run: a fork cannot use autograd if its parent has
            with multiprocessing.get_context("fork").Pool(2) as pool:
                result = pool.map(functools.partial(rehearse_as, **case), range(2))
        elif "num_processes" in case:
            result = rehearse_sharded(**case)
        else:
            result = rehearse(**case)
        print(json.dumps(result), flush=True)
