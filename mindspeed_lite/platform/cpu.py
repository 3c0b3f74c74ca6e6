"""The CPU as Megatron's device: `torch.cuda` and "cuda" tensors mean this process and gloo.

Megatron names its device `torch.cuda`. This file says what each of those names means on a machine without an
accelerator, so that the training script runs as it is: one process per "device", memory figures of the real
process, two separate random streams, collectives over gloo. Code inside torch keeps seeing the machine as it is
(see `redirect.asked_by_machine`), because it compiles and pins by what it finds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import platform as machine
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data
from torch.utils._device import DeviceContext, _device_constructors

from . import cpu_matmul, gloo, lanes, process_memory, streams
from .random_state import DeviceGenerators, HostRandom
from .redirect import NO_CUDA_EXTENSION, Redirects, for_the_host

name = "cpu"
distributed_backend = "gloo"

CPU = torch.device("cpu")

# The torch functions that make a tensor on a device named by keyword.
_FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_permuted empty_strided eye full full_like linspace logspace "
    "normal ones ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor "
    "sparse_coo_tensor tensor tril_indices triu_indices zeros zeros_like "
    "bartlett_window blackman_window hamming_window hann_window kaiser_window"
).split()
_TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")

_CUDA_TYPE_NAMES = {
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.int8: "torch.cuda.CharTensor",
    torch.int16: "torch.cuda.ShortTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


def on_cpu(device: Any) -> Any:
    """`device` with every way of naming a CUDA device turned into the CPU; others are returned as they are."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def available() -> list[str]:
    """Why this device cannot be used; always empty."""
    return []


def describe() -> str:
    """The processor's name, the cores this process may use, and what the device layer multiplies in fp32."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    widened = sorted(str(dtype).removeprefix("torch.") for dtype in cpu_matmul.widened())
    return f"{_processor()}, {cores} cores" + (f", {' and '.join(widened)} products in fp32" if widened else "")


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return machine.processor() or machine.machine()


def install(redirects: Redirects) -> None:
    """Redirect `torch.cuda`, device names and collectives to this process; `redirects.undo()` takes all back."""
    # `with torch.device(...)` collects its constructors on first use and must collect torch's own.
    _device_constructors()

    # Megatron refuses tensor parallelism on pre-Blackwell devices unless this is set; nothing on a CPU reads it.
    redirects.default_environment("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    redirects.default_environment(*NO_CUDA_EXTENSION)

    host_random = HostRandom()
    _redirect_device_queries(redirects)
    _redirect_memory(redirects)
    _redirect_random(redirects, host_random)
    _redirect_tensors(redirects)
    gloo.install(redirects)
    lanes.install(redirects, streams.queueing_lane)
    redirects.on_undo(cpu_matmul.install())
    redirects.rebind_importers()


def _redirect_device_queries(redirects: Redirects) -> None:
    cuda = torch.cuda

    def local_processes() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    redirects.set(cuda, "is_available", for_the_host(cuda.is_available, lambda: True))
    redirects.set(cuda, "is_initialized", for_the_host(cuda.is_initialized, lambda: True))
    redirects.set(cuda, "device_count", for_the_host(cuda.device_count, local_processes))
    redirects.set(cuda, "is_bf16_supported", for_the_host(cuda.is_bf16_supported, _true))
    redirects.set(cuda, "_lazy_init", for_the_host(cuda._lazy_init, _nothing))
    redirects.set(cuda, "init", for_the_host(cuda.init, _nothing))
    redirects.set(cuda, "_lazy_call", for_the_host(cuda._lazy_call, _call_now))
    redirects.set(cuda, "current_device", for_the_host(cuda.current_device, _current_device))
    redirects.set(cuda, "set_device", for_the_host(cuda.set_device, _nothing))
    redirects.set(cuda, "synchronize", for_the_host(cuda.synchronize, streams.synchronize))
    redirects.set(cuda, "empty_cache", for_the_host(cuda.empty_cache, _nothing))
    redirects.set(cuda, "ipc_collect", for_the_host(cuda.ipc_collect, _nothing))
    redirects.set(cuda, "check_error", for_the_host(cuda.check_error, _nothing))
    redirects.set(cuda, "cudart", for_the_host(cuda.cudart, _Cudart))
    redirects.set(cuda, "is_current_stream_capturing", for_the_host(cuda.is_current_stream_capturing, _false))
    redirects.set(cuda, "current_stream", for_the_host(cuda.current_stream, streams.current_stream))
    redirects.set(cuda, "default_stream", for_the_host(cuda.default_stream, streams.default_stream))
    redirects.set(cuda, "set_stream", for_the_host(cuda.set_stream, streams.set_stream))
    redirects.set(cuda, "stream", for_the_host(cuda.stream, streams.StreamContext))
    redirects.set(cuda, "StreamContext", streams.StreamContext)
    redirects.set(cuda, "device", _DeviceContext)
    redirects.set(cuda, "Stream", streams.Stream)
    redirects.set(cuda, "ExternalStream", streams.ExternalStream)
    redirects.set(cuda, "Event", streams.Event)
    # Ampere's number: bfloat16 exists, fp8 and grouped tensor-core kernels are not promised.
    redirects.set(cuda, "get_device_capability", for_the_host(cuda.get_device_capability, lambda *_, **__: (8, 0)))
    redirects.set(cuda, "get_device_name", for_the_host(cuda.get_device_name, lambda *_: _processor()))
    redirects.set(cuda, "get_device_properties", for_the_host(cuda.get_device_properties, _properties))
    for gauge in ("utilization", "temperature", "power_draw", "clock_rate"):
        redirects.set(cuda, gauge, for_the_host(getattr(cuda, gauge), _zero))
    for marker in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        if hasattr(cuda.nvtx, marker):
            redirects.set(cuda.nvtx, marker, for_the_host(getattr(cuda.nvtx, marker), _zero))
    redirects.set(cuda.nvtx, "range", _null_context)


def _redirect_memory(redirects: Redirects) -> None:
    cuda = torch.cuda

    def reset(device: Any = None) -> None:
        process_memory.reset_peak()

    answers: dict[str, Callable[..., Any]] = {
        "memory_allocated": _of_process(process_memory.resident),
        "memory_reserved": _of_process(process_memory.resident),
        "max_memory_allocated": _of_process(process_memory.peak_resident),
        "max_memory_reserved": _of_process(process_memory.peak_resident),
        "device_memory_used": _of_process(process_memory.resident),
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "memory_stats": _memory_stats,
        "mem_get_info": lambda device=None: (process_memory.available(), process_memory.total()),
        "memory_summary": lambda *_, **__: f"resident {process_memory.resident()} bytes",
        "memory_snapshot": lambda *_, **__: [],
    }
    for function, answer in answers.items():
        if not hasattr(cuda, function):
            continue
        chosen = for_the_host(getattr(cuda, function), answer)
        redirects.set(cuda, function, chosen)
        if function in vars(cuda.memory):
            redirects.set(cuda.memory, function, chosen)


def _redirect_random(redirects: Redirects, host: HostRandom) -> None:
    generator = torch.default_generator

    def device_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    answers: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "set_rng_state_all": lambda new_states: generator.set_state(next(iter(new_states))),
        "manual_seed": device_seed,
        "manual_seed_all": device_seed,
        "initial_seed": lambda: generator.initial_seed(),
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
    }
    for function, answer in answers.items():
        chosen = for_the_host(getattr(torch.cuda, function), answer)
        redirects.set(torch.cuda, function, chosen)
        redirects.set(torch.cuda.random, function, chosen)
    redirects.set(torch.cuda, "default_generators", DeviceGenerators())

    own_seed = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        host.manual_seed(int(seed))
        return own_seed(seed)

    replacements = {
        "get_rng_state": for_the_host(torch.get_rng_state, host.get_state),
        "set_rng_state": for_the_host(torch.set_rng_state, lambda new_state: host.set_state(new_state)),
        "manual_seed": for_the_host(torch.manual_seed, manual_seed),
    }
    for function, chosen in replacements.items():
        redirects.set(torch, function, chosen)
        redirects.set(torch.random, function, chosen)

    own_fork = torch.random.fork_rng

    @contextlib.contextmanager
    @functools.wraps(own_fork)
    def fork_rng(*args: Any, **kwargs: Any) -> Any:
        before = host.get_state()
        with own_fork(*args, **kwargs):
            try:
                yield
            finally:
                if kwargs.get("enabled", args[1] if len(args) > 1 else True):
                    host.set_state(before)

    redirects.set(torch.random, "fork_rng", fork_rng)

    own_shuffle = torch.utils.data.RandomSampler.__iter__

    @functools.wraps(own_shuffle)
    def shuffle(self: Any) -> Any:
        if self.generator is None:
            # Drawn at the first batch, after the loader's own draw: also the host's business.
            with host.drawing():
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
            self = copy.copy(self)
            self.generator = torch.Generator().manual_seed(seed)
        yield from own_shuffle(self)

    redirects.set(torch.utils.data.RandomSampler, "__iter__", shuffle)

    loader_iter = torch.utils.data.DataLoader.__iter__

    @functools.wraps(loader_iter)
    def iterate(self: Any) -> Any:
        # The loader draws its workers' base seed here: on a GPU run that is the host's business.
        with host.drawing(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pin_memory.*")
            return loader_iter(self)

    redirects.set(torch.utils.data.DataLoader, "__iter__", iterate)


def _redirect_tensors(redirects: Redirects) -> None:
    for function in _FACTORIES:
        if hasattr(torch, function):
            redirects.set(torch, function, _factory(getattr(torch, function)))
    for function in ("fftfreq", "rfftfreq"):
        redirects.set(torch.fft, function, _factory(getattr(torch.fft, function)))
    own_context = DeviceContext.__init__

    @functools.wraps(own_context)
    def enter_device(self: Any, device: Any) -> None:
        own_context(self, on_cpu(device))

    # `with torch.device("cuda")` and `torch.set_default_device` both come through here.
    redirects.set(DeviceContext, "__init__", enter_device)
    tensor = torch.Tensor
    for function in _TENSOR_FACTORIES:
        redirects.set(tensor, function, _factory(getattr(tensor, function)))

    own_to, own_type, own_load = tensor.to, tensor.type, torch.load

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = args[0] if args else kwargs.get("device")
        if isinstance(named, str) and named == "cpu" and not kwargs.get("non_blocking"):
            # For the host. A torch.device of that name is that of tensors here, too.
            lanes.finish_for((self,))
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return own_to(self, *args, **kwargs)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own_to(self, CPU)

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.device.type == "cpu":
            return _CUDA_TYPE_NAMES.get(self.dtype) or own_type(self)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return own_type(self, dtype, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {source: _location(target) for source, target in map_location.items()}
        return own_load(f, on_cpu(map_location), *args, **kwargs)

    redirects.set(tensor, "to", functools.wraps(own_to)(to))
    redirects.set(tensor, "cuda", functools.wraps(tensor.cuda)(cuda))
    redirects.set(tensor, "type", for_the_host(own_type, type_name))
    redirects.set(tensor, "record_stream", _nothing)
    redirects.set(tensor, "pin_memory", lambda self, *args, **kwargs: self)
    redirects.set(torch, "load", functools.wraps(own_load)(load))
    for owner in (torch, torch.amp):
        redirects.set(owner, "autocast", _Autocast)
    for owner in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        redirects.set(owner, "autocast", _CudaAutocast)
    for name in _CUDA_TYPE_NAMES.values():
        short = name.rpartition(".")[2]
        if hasattr(torch, short):
            redirects.set(torch.cuda, short, getattr(torch, short), shared=True)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return original(*args, **kwargs)

    return make


def _location(target: Any) -> Any:
    return "cpu" if on_cpu(target) is CPU else target


class _DeviceContext:
    """Stands for `torch.cuda.device`: a context manager that selects nothing."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class _Autocast(torch.amp.autocast_mode.autocast):
    """`torch.autocast` in which "cuda" means the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class _CudaAutocast(_Autocast):
    """`torch.cuda.amp.autocast`, which names no device."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class _Cudart:
    """Stands for the CUDA runtime where profilers start and stop."""

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


class _Properties:
    """The fields of `torch.cuda.get_device_properties` that have a meaning on a CPU."""

    def __init__(self) -> None:
        self.name = _processor()
        self.major, self.minor = 8, 0
        self.total_memory = process_memory.total()
        self.multi_processor_count = os.cpu_count() or 1
        self.warp_size = 1


def _properties(device: Any = None) -> _Properties:
    return _Properties()


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = process_memory.resident(), process_memory.peak_resident()
    stats = {}
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        for kind in ("all", "large_pool", "small_pool"):
            share = kind != "small_pool"
            stats[f"{pool}.{kind}.current"] = now * share
            stats[f"{pool}.{kind}.peak"] = peak * share
            stats[f"{pool}.{kind}.allocated"] = peak * share
            stats[f"{pool}.{kind}.freed"] = 0
    stats["allocation.all.current"] = 0
    stats["num_alloc_retries"] = 0
    stats["num_ooms"] = 0
    return stats


def _of_process(read: Callable[[], int]) -> Callable[..., int]:
    return lambda device=None: read()


def _current_device() -> torch.device:
    return CPU


def _call_now(callable: Callable[[], Any], **kwargs: Any) -> None:
    callable()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _true(*args: Any, **kwargs: Any) -> bool:
    return True


def _false(*args: Any, **kwargs: Any) -> bool:
    return False


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Any:
    yield
