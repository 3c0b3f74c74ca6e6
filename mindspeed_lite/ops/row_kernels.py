"""What Triton kernels over rows share: the shape of a program, and the second stage of sums over rows.

The first stage is the kernel's own: each program sums over a fixed set of rows and writes one row of parts. There are
no atomics, so results repeat.
"""

# A kernel's parameters have no types in Python.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

WIDEST = 16384  # numbers of a row that one program can hold


@triton.jit
def total_kernel(parts, out, count, width, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], dtype=tl.float32)
    start = 0
    while start < count:
        part = start + tl.arange(0, 16)
        inside = (part[:, None] < count) & (column[None, :] < width)
        sum += tl.sum(tl.load(parts + part[:, None] * width + column[None, :], mask=inside, other=0.0), axis=0)
        start += 16
    tl.store(out + column, sum.to(out.dtype.element_ty), mask=column < width)


class Launch(NamedTuple):
    """Shape of a program's tile, and its warps."""

    rows: int
    block: int
    warps: int


@functools.cache
def launch(width: int) -> Launch:
    """Eight numbers for a thread, as long as there are threads: more registers would leave too few programs."""
    block: int = triton.next_power_of_2(width)
    rows = max(1, min(16, 1024 // block))
    return Launch(rows, block, 4 if block <= 1024 else (8 if block <= 2048 else (16 if block <= 8192 else 32)))


@functools.cache
def programs(device: torch.device) -> int:
    """How many programs share the rows in the backward pass."""
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def on(t: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the device of `t`."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()
