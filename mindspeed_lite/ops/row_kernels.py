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


_PARTS, _COLUMNS = 128, 32


@triton.jit
def total_kernel(parts, out, count, width, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sum = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part[:, None] < count) & (column[None, :] < width)
        sum += tl.sum(tl.load(parts + part[:, None] * width + column[None, :], mask=inside, other=0.0), axis=0)
    tl.store(out + column, sum.to(out.dtype.element_ty), mask=column < width)


def add_up(parts: torch.Tensor, out: torch.Tensor) -> None:
    """out [N] = the sum over P of parts [P, N], both contiguous, in out's dtype; in the same order at every call."""
    count, width = parts.shape
    total_kernel[(triton.cdiv(width, _COLUMNS),)](parts, out, count, width, _PARTS, _COLUMNS)


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


def programs(device: torch.device, resident: int, tiles: int, splits: int = 1) -> int:
    """How many programs share `tiles`, of which each takes `splits` programs, `resident` on a multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter
        return min(3, tiles)
    return min(max(1, resident * _multiprocessors(device) // splits), tiles)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(t: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the device of `t`."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()
