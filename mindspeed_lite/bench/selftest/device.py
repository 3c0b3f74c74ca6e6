"""Checks device layer, copies, streams, random state, memory and collectives.

Streams, random state and memory are checked on accelerators only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_lite import platform
from mindspeed_lite.bench.selftest import Check, Outcome

_MEGABYTE = 1 << 20


class DeviceCheckError(AssertionError):
    """The device behaves otherwise than expected."""


def checks(device: str) -> list[Check]:
    backend = platform.device(device).distributed_backend
    found = [
        Check("device", "device layer", functools.partial(layer, device)),
        Check("device", "copies and arithmetic", functools.partial(arithmetic, device)),
    ]
    if device != "cpu":
        module = getattr(torch, device)
        found += [
            Check("device", name, functools.partial(check, module, device))
            for name, check in (
                ("streams and events", streams),
                ("random state", random_state),
                ("memory statistics", memory),
            )
        ]
    return [*found, Check("device", f"process group ({backend})", functools.partial(process_group, device, backend))]


def layer(device: str) -> Outcome:
    """Activates the device layer; on an NPU, "cuda" then means npu."""
    chosen = platform.activate(device)
    text = chosen.describe()
    if device == "npu":
        made = torch.ones(2, device="cuda").device.type
        if made != "npu":
            raise DeviceCheckError(f"transfer_to_npu is not active: a tensor made on 'cuda' is on {made!r}")
        npu: Any = getattr(torch, device)
        if not torch.cuda.is_available() or torch.cuda.device_count() != npu.device_count():
            raise DeviceCheckError(
                f"transfer_to_npu is not active: torch.cuda sees {torch.cuda.device_count()} devices, "
                f"torch.npu {npu.device_count()}"
            )
        text += ", transfer_to_npu active"
    return Outcome(text)


def arithmetic(device: str) -> Outcome:
    generator = torch.Generator().manual_seed(4)
    a = torch.randint(-8, 9, (96, 64), generator=generator).float()
    b = torch.randint(-8, 9, (64, 80), generator=generator).float()
    there = a.to(device)
    if not torch.equal(there.cpu(), a):
        raise DeviceCheckError("a tensor copied to the device and back differs")
    for dtype in (torch.float32, torch.bfloat16):
        # Sums below 2 ** 13 of exact bf16 factors; the result is rounded once.
        got = (there.to(dtype) @ b.to(device, dtype)).float().cpu()
        off = float((got - (a @ b)).abs().max().item())
        allowed = 0.0 if dtype == torch.float32 else float((a @ b).abs().max().item()) * 2**-8
        if not off <= allowed:
            raise DeviceCheckError(f"a {dtype} matmul of integers is off by {off:g}, allowed {allowed:g}")
    return Outcome("a copy there and back is equal, a matmul of integers exact")


def streams(module: Any, device: str) -> Outcome:
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
    if not elapsed > 0:
        raise DeviceCheckError(f"eight matmuls between two events took {elapsed} ms")
    if abs(total - 1024.0**2) > 1024:
        raise DeviceCheckError(f"a second stream's result sums to {total:g}, not {1024**2}: wait_stream did not wait")
    return Outcome(f"eight matmuls on a second stream, {elapsed:.3f} ms by its events")


def random_state(module: Any, device: str) -> Outcome:
    def draw() -> torch.Tensor:
        return torch.randn(1000, device=device).cpu()

    module.manual_seed(7)
    seeded = draw()
    state = module.get_rng_state()
    first = draw()
    module.set_rng_state(state)
    if not torch.equal(draw(), first):
        raise DeviceCheckError("a restored random state gives other values")
    module.manual_seed(7)
    if not torch.equal(draw(), seeded):
        raise DeviceCheckError("the same seed gives other values")
    if torch.equal(seeded, first):
        raise DeviceCheckError("drawing does not advance the random state")
    return Outcome("a restored state and a seed give the same values")


def memory(module: Any, device: str) -> Outcome:
    module.synchronize()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    tensor = torch.ones(64 * _MEGABYTE, device=device, dtype=torch.uint8)
    held = module.memory_allocated() - before
    del tensor
    left, peak = module.memory_allocated() - before, module.max_memory_allocated() - before
    for name, value, good in (
        ("memory_allocated moves by", held, held >= 64 * _MEGABYTE),
        ("max_memory_allocated moves by", peak, peak >= 64 * _MEGABYTE),
        ("after it is freed there remain", left, left < 32 * _MEGABYTE),
    ):
        if not good:
            raise DeviceCheckError(f"with a tensor of 64 MB {name} {value / _MEGABYTE:g} MB")
    return Outcome(f"a tensor of 64 MB moves them by {held / _MEGABYTE:g} MB, and back")


def process_group(device: str, backend: str) -> Outcome:
    distributed: Any = torch.distributed
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.full((1000,), 3.0, device=device)
        distributed.all_reduce(tensor)
        if not bool((tensor.cpu() == 3.0).all()):
            raise DeviceCheckError("all_reduce in a group of one changes the tensor")
        distributed.barrier()
        text = "forms, all_reduce and barrier end"
        if device == "npu":
            group: Any = distributed.group.WORLD
            name = group._get_backend(torch.device(device)).get_hccl_comm_name(0)
            if not isinstance(name, str) or not name:
                raise DeviceCheckError(f"the group's hcom name is {name!r}: fused communication operators need one")
            text += f", hcom name {name}"
        return Outcome(text)
    finally:
        distributed.destroy_process_group()
