"""CPU device layer: `torch.cuda` and "cuda" tensors mean this process and gloo.

One process per device. torch's own code sees the real machine (`redirect.asked_by_machine`), by which it compiles and
pins memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform as machine
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.data
from torch.utils._device import DeviceContext, _device_constructors

from . import cpu_matmul, gloo, process_memory, streams
from .redirect import NO_CUDA_EXTENSION, Redirects, for_the_host

name = "cpu"
distributed_backend = "gloo"

CPU = torch.device("cpu")

# Functions with a `device` besides torch's own constructors.
_FACTORIES = "normal empty_like full_like ones_like rand_like randint_like randn_like zeros_like".split()
_TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")

_TYPES = "Half BFloat16 Float Double Byte Char Short Int Long Bool".split()


def on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def available() -> list[str]:
    return []


def describe() -> str:
    widened = sorted(str(dtype).removeprefix("torch.") for dtype in cpu_matmul.widened())
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores" + (
        f", {' and '.join(widened)} products in fp32" if widened else ""
    )


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return machine.processor() or machine.machine()


def install(redirects: Redirects) -> None:
    """Redirect `torch.cuda`, device names and collectives; `redirects.close()` restores them."""
    # Cached on first use of `with torch.device(...)`; must be torch's own constructors.
    _device_constructors()

    # Megatron requires it for tensor parallelism; unused on a CPU.
    redirects.default_environment("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    redirects.default_environment(*NO_CUDA_EXTENSION)

    _redirect_device(redirects)
    _redirect_random(redirects)
    _redirect_tensors(redirects)
    gloo.install(redirects)
    redirects.callback(cpu_matmul.install())


def _redirect_device(redirects: Redirects) -> None:
    cuda, none = torch.cuda, _constant(None)
    _answer(redirects, cuda, {
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": lambda: CPU,
        # Ampere: has bfloat16, promises neither fp8 nor grouped tensor-core kernels.
        "get_device_capability": _constant((8, 0)),
        "get_device_name": lambda *_: _processor(),
        "get_device_properties": _properties,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=_constant(0), cudaProfilerStop=_constant(0)),
        "_lazy_call": lambda callable, **_: callable(),
        **dict.fromkeys(("_lazy_init", "init", "set_device", "synchronize", "empty_cache", "ipc_collect"), none),
        "check_error": none,
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), _constant(0)),
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.StreamContext,
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "device_memory_used"), _of_process(process_memory.resident)
        ),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _of_process(process_memory.peak_resident)),
        **dict.fromkeys(
            ("reset_peak_memory_stats", "reset_max_memory_allocated"), _of_process(process_memory.reset_peak)
        ),
        "memory_stats": _memory_stats,
        "mem_get_info": lambda device=None: (process_memory.available(), process_memory.total()),
        "memory_summary": lambda *_, **__: f"resident {process_memory.resident()} bytes",
        "memory_snapshot": lambda *_, **__: [],
    })  # fmt: skip
    markers = ("range_push", "range_pop", "mark", "range_start", "range_end")
    _answer(redirects, cuda.nvtx, dict.fromkeys(markers, _constant(0)))
    for owner, attribute, value in (
        (cuda, "StreamContext", streams.StreamContext),
        (cuda, "Stream", streams.Stream),
        (cuda, "ExternalStream", type("ExternalStream", (streams.Stream,), {})),
        (cuda, "Event", streams.Event),
        (cuda.nvtx, "range", _no_range),
    ):
        redirects.set(owner, attribute, value)
    redirects.set(cuda, "device", contextlib.nullcontext)


def _answer(redirects: Redirects, owner: Any, answers: Mapping[str, Callable[..., Any]]) -> None:
    for function, answer in answers.items():
        if hasattr(owner, function):
            redirects.wrap(owner, function, functools.partial(for_the_host, answer=answer))


def _redirect_random(redirects: Redirects) -> None:
    """Separate the host's random state from the device's, which is that of torch's default generator.

    Megatron saves both and warns if device operations move the host's. Data loaders draw from the host's, since not all
    tensor-parallel ranks have one.
    """
    generator, host = torch.default_generator, torch.Generator()
    host.set_state(generator.get_state())

    def seed_device(seed: int) -> None:
        generator.manual_seed(int(seed))

    def seed_both(seed: int) -> torch.Generator:
        host.manual_seed(int(seed))
        return generator.manual_seed(int(seed))

    _answer(redirects, torch.cuda, {
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "set_rng_state_all": lambda new_states: generator.set_state(next(iter(new_states))),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), seed_device),
        "initial_seed": lambda: generator.initial_seed(),
        **dict.fromkeys(("seed", "seed_all"), lambda: generator.seed()),
    })  # fmt: skip
    redirects.set(torch.cuda, "default_generators", DeviceGenerators((generator,)))
    _answer(redirects, torch, {
        "get_rng_state": lambda: host.get_state(),
        "set_rng_state": lambda new_state: host.set_state(new_state),
        "manual_seed": seed_both,
    })  # fmt: skip

    def forking(original: Any) -> Any:
        @contextlib.contextmanager
        def fork_rng(*args: Any, **kwargs: Any) -> Any:
            before = host.get_state()
            with original(*args, **kwargs):
                try:
                    yield
                finally:
                    if kwargs.get("enabled", args[1] if len(args) > 1 else True):
                        host.set_state(before)

        return fork_rng

    def drawing_from_host(original: Any) -> Any:
        def iterate(self: Any) -> Any:
            self.generator = self.generator or host
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*pin_memory.*")
                return original(self)

        return iterate

    redirects.wrap(torch.random, "fork_rng", forking)
    for owner in (torch.utils.data.DataLoader, torch.utils.data.RandomSampler):
        redirects.wrap(owner, "__iter__", drawing_from_host)


class DeviceGenerators(tuple[torch.Generator, ...]):
    """`torch.cuda.default_generators` in which every index is the CPU generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def _redirect_tensors(redirects: Redirects) -> None:
    for function in {*_FACTORIES, *(each.__name__ for each in _device_constructors())}:
        owner: Any = torch.fft if function.startswith("fft_") else torch
        name = function.removeprefix("fft_")
        if hasattr(owner, name):
            redirects.wrap(owner, name, _factory)
    # Shared by `with torch.device("cuda")` and `torch.set_default_device`.
    redirects.wrap(DeviceContext, "__init__", lambda original: lambda self, device: original(self, on_cpu(device)))
    tensor = torch.Tensor
    for function in _TENSOR_FACTORIES:
        redirects.wrap(tensor, function, _factory)
    own_to, own_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return own_to(self, *args, **kwargs)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own_to(self, CPU)

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.device.type == "cpu":
            return str(own_type(self)).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return own_type(self, dtype, *args, **kwargs)

    redirects.set(tensor, "to", functools.wraps(own_to)(to))
    redirects.set(tensor, "cuda", functools.wraps(tensor.cuda)(cuda))
    redirects.set(tensor, "type", for_the_host(own_type, type_name))
    redirects.set(tensor, "record_stream", _constant(None))
    redirects.set(tensor, "pin_memory", lambda self, *args, **kwargs: self)
    redirects.wrap(torch, "load", _loading)
    for owner in (torch, torch.amp):
        redirects.set(owner, "autocast", _Autocast)
    for owner in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        redirects.set(owner, "autocast", _CudaAutocast)
    for short in _TYPES:
        redirects.set(torch.cuda, f"{short}Tensor", getattr(torch, f"{short}Tensor"))


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return original(*args, **kwargs)

    return make


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {source: _location(target) for source, target in map_location.items()}
        return original(f, on_cpu(map_location), *args, **kwargs)

    return load


def _location(target: Any) -> Any:
    return "cpu" if on_cpu(target) is CPU else target


class _Autocast(torch.amp.autocast_mode.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class _CudaAutocast(_Autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_processor(),
        major=8,
        minor=0,
        total_memory=process_memory.total(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=1,
    )


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = process_memory.resident(), process_memory.peak_resident()
    stats = dict.fromkeys(("allocation.all.current", "num_alloc_retries", "num_ooms"), 0)
    for pool in ("allocated_bytes.all", "reserved_bytes.all", "active_bytes.all"):
        stats |= {f"{pool}.current": now, f"{pool}.peak": peak, f"{pool}.allocated": peak, f"{pool}.freed": 0}
    return stats


def _of_process(read: Callable[[], Any]) -> Callable[..., Any]:
    return lambda device=None: read()


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def _no_range(*args: Any, **kwargs: Any) -> Any:
    yield
