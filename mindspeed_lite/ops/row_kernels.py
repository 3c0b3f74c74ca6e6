"""Launch shapes of Triton row kernels, and the second stage of sums over rows.

In the first stage each program sums a fixed set of rows into one row of parts. No atomics: deterministic.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384  # values of a row per program


# Triton's own take 2.6 us on the host.
def cdiv(count: int, size: int) -> int:
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


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


def add_up(parts: Tensor, out: Tensor) -> None:
    """out [N] = sum over P of parts [P, N], both contiguous, in out's dtype; deterministic."""
    count, width = parts.shape
    total_kernel[(cdiv(width, _COLUMNS),)](parts, out, count, width, _PARTS, _COLUMNS)


class Launch(NamedTuple):
    """Tile shape and warps."""

    rows: int
    block: int
    warps: int


@functools.cache
def launch(width: int) -> Launch:
    """Eight values per thread while threads last: more registers would lower occupancy."""
    block: int = next_power_of_2(width)
    rows = max(1, min(16, 1024 // block))
    return Launch(rows, block, 4 if block <= 1024 else (8 if block <= 2048 else (16 if block <= 8192 else 32)))


def programs(device: torch.device, resident: int, tiles: int, splits: int = 1) -> int:
    """Programs for `tiles` of `splits` programs each, at `resident` programs per multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter
        return min(3, tiles)
    return min(max(1, resident * _multiprocessors(device) // splits), tiles)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches on the device of `t`."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()
