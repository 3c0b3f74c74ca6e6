"""Checks device layer, copies, streams, random state, memory and collectives.

Streams, random state and memory are checked on accelerators only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite import platform
from mindspeed_lite.bench.selftest import Check, CheckResult

_MEGABYTE = 1 << 20


class DeviceCheckError(AssertionError):
    """A device check found unexpected behaviour."""


def checks(device: str) -> list[Check]:
    backend = platform.device(device).distributed_backend
    found: dict[str, Callable[[], str]] = {
        "device layer": functools.partial(layer, device),
        "copies and arithmetic": functools.partial(arithmetic, device),
    }
    if device != "cpu":
        module = getattr(torch, device)
        found["streams and events"] = functools.partial(streams, module, device)
        found["random state"] = functools.partial(random_state, module, device)
        found["memory statistics"] = functools.partial(memory, module, device)
    found[f"process group ({backend})"] = functools.partial(process_group, device, backend)
    return [Check("device", name, lambda check=check: CheckResult(check())) for name, check in found.items()]  # type: ignore[misc]


def _require(is_met: bool, problem: str) -> None:
    if not is_met:
        raise DeviceCheckError(problem)


def layer(device: str) -> str:
    """Activates the device layer; on an NPU, "cuda" then means npu."""
    text = platform.activate(device).describe()
    if device != "npu":
        return text
    made, inactive = torch.ones(2, device="cuda").device.type, "transfer_to_npu is not active"
    _require(made == "npu", f"{inactive}: a tensor made on 'cuda' is on {made!r}")
    counts = torch.cuda.device_count(), getattr(torch, device).device_count()
    are_equal = torch.cuda.is_available() and counts[0] == counts[1]
    _require(are_equal, f"{inactive}: torch.cuda sees {counts[0]} devices, torch.npu {counts[1]}")
    return f"{text}, transfer_to_npu active"


def arithmetic(device: str) -> str:
    generator = torch.Generator().manual_seed(4)
    a = torch.randint(-8, 9, (96, 64), generator=generator).float()
    b = torch.randint(-8, 9, (64, 80), generator=generator).float()
    there = a.to(device)
    _require(torch.equal(there.cpu(), a), "a tensor copied to the device and back differs")
    for dtype in (torch.float32, torch.bfloat16):
        # Sums below 2 ** 13 of exact bf16 factors; the result is rounded once.
        got = (there.to(dtype) @ b.to(device, dtype)).float().cpu()
        off = float((got - (a @ b)).abs().max().item())
        allowed = 0.0 if dtype == torch.float32 else float((a @ b).abs().max().item()) * 2**-8
        _require(off <= allowed, f"a {dtype} matmul of integers is off by {off:g}, allowed {allowed:g}")
    return "a copy there and back is equal, a matmul of integers exact"


def streams(module: Any, device: str) -> str:
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    a = torch.ones(1024, 1024, device=device)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        start.record()
        b = a
        for _ in range(8):
            b = b @ a / 1024
        end.record()
    module.current_stream().wait_stream(side)
    total = float(b.sum().item())
    module.synchronize()
    elapsed = float(start.elapsed_time(end))
    _require(elapsed > 0, f"eight matmuls between two events took {elapsed} ms")
    problem = f"a second stream's result sums to {total:g}, not {1024**2}: wait_stream did not wait"
    _require(abs(total - 1024.0**2) <= 1024, problem)
    return f"eight matmuls on a second stream, {elapsed:.3f} ms by its events"


def random_state(module: Any, device: str) -> str:
    def draw() -> torch.Tensor:
        return torch.randn(1000, device=device).cpu()

    module.manual_seed(7)
    seeded = draw()
    state = module.get_rng_state()
    first = draw()
    module.set_rng_state(state)
    _require(torch.equal(draw(), first), "a restored random state gives other values")
    module.manual_seed(7)
    _require(torch.equal(draw(), seeded), "the same seed gives other values")
    _require(not torch.equal(seeded, first), "drawing does not advance the random state")
    return "a restored state and a seed give the same values"


def memory(module: Any, device: str) -> str:
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    tensor = torch.ones(64 * _MEGABYTE, device=device, dtype=torch.uint8)
    held = (module.memory_allocated() - before) / _MEGABYTE
    del tensor
    left, peak = ((each() - before) / _MEGABYTE for each in (module.memory_allocated, module.max_memory_allocated))
    _require(held >= 64, f"with a tensor of 64 MB memory_allocated moves by {held:g} MB")
    _require(peak >= 64, f"with a tensor of 64 MB max_memory_allocated moves by {peak:g} MB")
    _require(left < 32, f"of a tensor of 64 MB there remain {left:g} MB after it is freed")
    return f"a tensor of 64 MB moves them by {held:g} MB, and back"


def process_group(device: str, backend: str) -> str:
    distributed: Any = torch.distributed
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.full((1000,), 3.0, device=device)
        distributed.all_reduce(tensor)
        _require(bool((tensor.cpu() == 3.0).all()), "all_reduce in a group of one changes the tensor")
        distributed.barrier()
        if device != "npu":
            return "forms, all_reduce and barrier end"
        name = distributed.group.WORLD._get_backend(torch.device(device)).get_hccl_comm_name(0)
        problem = f"the group's hcom name is {name!r}: fused communication operators need one"
        _require(isinstance(name, str) and bool(name), problem)
        return f"forms, all_reduce and barrier end, hcom name {name}"
    finally:
        distributed.destroy_process_group()
