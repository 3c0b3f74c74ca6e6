"""grouped_matmul on CUDA: one Triton kernel for all experts' matmuls, one for their weight gradients.

No synchronisation: counts are read on the device. The persistent matmul's tile order keeps `GROUP` row blocks and a
column block in L2, a ninth of column order's reads at 128 x 128 tiles.
"""

# Triton's decorator and the arguments of its kernels have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import is_required
from mindspeed_lite.ops.grouped_matmul import Case
from mindspeed_lite.ops.row_kernels import cdiv, next_power_of_2, on, programs
from mindspeed_lite.ops.streams import stream_id
from mindspeed_lite.ops.traced import addresses

Tensors = Sequence[Tensor]


class Tiles(NamedTuple):
    """Tile sizes: ROWS of x, WIDTH of the result, DEPTH of the reduction."""

    rows: int
    width: int
    depth: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Compile options. Without a register limit, ptxas may spill to fit unneeded programs."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": 248}


# Many rows: half the reads of one operand of LARGE. Registers hold one program per multiprocessor: four stages.
HUGE = Tiles(128, 256, 64, 8, 4)
LARGE = Tiles(128, 128, 64, 8, 4)
# Weight gradients: two programs share a multiprocessor's registers and 227 KiB of shared memory.
GRADIENT = Tiles(128, 128, 64, 8, 3)
FLAT = Tiles(64, 128, 64, 4, 3)
# Decoding or many experts.
THIN = Tiles(32, 128, 64, 4, 4)
# fp32, without tensor cores.
WIDE = Tiles(64, 64, 32, 8, 3)

COUNTS_ON_HOST = False
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Consecutive row blocks that share a column block.
GROUP = 8


def supported(case: Case) -> list[str]:
    return [] if case.contiguous else ["a main gradient is not contiguous"]


def weight_gradients(dy: Tensor, x: Tensor, counts: Tensor) -> Tensors:
    found = torch.empty(len(counts), dy.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    _multiply_gradients(found, None, dy, x, counts)
    return found.unbind()


def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: Tensor) -> None:
    _multiply_gradients(main_grads[0], main_grads, dy, x, counts)
    # PyTorch did not see the writes.
    for some in (list(main_grads),) if _COUNTS_MANY else main_grads:
        torch.autograd.graph.increment_version(some)


def grouped_matmul(x: Tensor, weights: Tensors, counts: Tensor, biases: Tensors | None, transposed: bool) -> Tensor:
    (rows, k), n = x.shape, weights[0].shape[0 if transposed else 1]
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    tiles = _tiles(x, len(weights), n)
    weights = list(map(Tensor.contiguous, weights))
    biases = None if biases is None else list(map(Tensor.contiguous, biases))
    table, aligned = _addresses(weights)
    # Upper bound on tiles, without reading counts.
    most = cdiv(n, tiles.width) * (cdiv(rows, tiles.rows) + len(weights))
    with on(x):
        product_kernel[(programs(x.device, 8 // tiles.warps, most),)](
            x.contiguous(), table, None if biases is None else _addresses(biases)[0], counts.contiguous(), y,
            N=n, K=k, EXPERTS=len(weights), PADDED=next_power_of_2(len(weights)),
            TRANSPOSED=transposed, BIASED=biases is not None, ALIGNED=aligned, PRECISION=_precision(), GROUP=GROUP,
            ROWS=tiles.rows, WIDTH=tiles.width, DEPTH=tiles.depth, **tiles.options,
        )  # fmt: skip
    return y


def _multiply_gradients(out: Tensor, main_grads: Tensors | None, dy: Tensor, x: Tensor, counts: Tensor) -> None:
    """`out` [E, N, K]: the result, or one of the main gradients to add to."""
    n, k, experts = dy.shape[1], x.shape[1], len(counts)
    tiles = WIDE if x.dtype == torch.float32 else GRADIENT
    table, aligned = (None, False) if main_grads is None else _addresses(main_grads)
    with on(x):
        gradient_kernel[(cdiv(k, tiles.width), cdiv(n, tiles.rows), experts)](
            dy.contiguous(), x.contiguous(), counts.contiguous(), out, table,
            N=n, K=k, EXPERTS=experts, PADDED=next_power_of_2(experts), ADDS=main_grads is not None,
            ALIGNED=aligned, PRECISION=_precision(), GROUP=GROUP,
            ROWS=tiles.rows, WIDTH=tiles.width, DEPTH=tiles.depth, **tiles.options,
        )  # fmt: skip


@triton.jit
def product_kernel(
    x_ptr, weights_ptr, biases_ptr, counts_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    TRANSPOSED: tl.constexpr, BIASED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    numbers = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + numbers, mask=numbers < EXPERTS, other=0)
    # A block's expert is the first whose end exceeds it.
    blocks = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    total_blocks = tl.sum(blocks, axis=0).to(tl.int32)
    COLUMNS: tl.constexpr = (N + WIDTH - 1) // WIDTH
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), total_blocks * COLUMNS, tl.num_programs(0)):
        block, place = tl.swizzle2d(tile // COLUMNS, tile % COLUMNS, total_blocks, COLUMNS, GROUP)
        expert = tl.sum((ends <= block).to(tl.int32), axis=0)
        block -= tl.sum(tl.where(numbers < expert, blocks, 0), axis=0)
        first = tl.sum(tl.where(numbers < expert, counts, 0), axis=0) + block * ROWS
        left = (tl.sum(tl.where(numbers == expert, counts, 0), axis=0) - block * ROWS).to(tl.int32)

        weight_ptr = tl.load(weights_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
        if ALIGNED:
            weight_ptr = tl.multiple_of(weight_ptr, 16)
        column = place * WIDTH + tl.arange(0, WIDTH)
        x_ptrs = x_ptr + first * K + row[:, None] * K + depth[None, :]
        if TRANSPOSED:
            weight_ptrs = weight_ptr + column[None, :].to(tl.int64) * K + depth[:, None]
        else:
            weight_ptrs = weight_ptr + depth[:, None].to(tl.int64) * N + column[None, :]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(0, K, DEPTH):
            inside = depth < K - start
            x = tl.load(x_ptrs, mask=(row < left)[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=inside[:, None] & (column < N)[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
            x_ptrs += DEPTH
            weight_ptrs += DEPTH if TRANSPOSED else DEPTH * N
        if BIASED:
            bias_ptr = tl.load(biases_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
            total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + first * N + row[:, None] * N + column[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(row < left)[:, None] & (column < N)[None, :])


@triton.jit
def gradient_kernel(
    dy_ptr, x_ptr, counts_ptr, out_ptr, main_grads_ptr,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    ADDS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    numbers = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + numbers, mask=numbers < EXPERTS, other=0)
    first = tl.sum(tl.where(numbers < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(numbers == expert, counts, 0), axis=0).to(tl.int32)
    if ADDS:  # noqa: SIM102  # the compiler decides this one
        if count == 0:
            return

    across, along = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP
    )  # fmt: skip
    row = across * ROWS + tl.arange(0, ROWS)
    column = along * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, DEPTH)
    dy_ptrs = dy_ptr + first * N + token[None, :] * N + row[:, None]
    x_ptrs = x_ptr + first * K + token[:, None] * K + column[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, count, DEPTH):
        inside = token < count - start
        dy = tl.load(dy_ptrs, mask=(row < N)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=inside[:, None] & (column < K)[None, :], other=0.0)
        total = tl.dot(dy, x, total, input_precision=PRECISION)
        dy_ptrs += DEPTH * N
        x_ptrs += DEPTH * K

    # In halves: with what is added, a whole tile would leave registers for one program per multiprocessor.
    PARTS: tl.constexpr = 2 if ADDS and WIDTH > 64 else 1
    if ADDS:
        out_ptr = tl.load(main_grads_ptr + expert).to(tl.pointer_type(out_ptr.dtype.element_ty))
        if ALIGNED:
            out_ptr = tl.multiple_of(out_ptr, 16)
    else:
        out_ptr += expert.to(tl.int64) * N * K
    column = along * WIDTH + tl.arange(0, WIDTH // PARTS)
    if PARTS == 2:
        left, right = tl.split(total.reshape(ROWS, 2, WIDTH // 2).permute(0, 2, 1))
        _put(out_ptr, left, row, column, N, K, ADDS)
        _put(out_ptr, right, row, column + WIDTH // 2, N, K, ADDS)
    else:
        _put(out_ptr, total, row, column, N, K, ADDS)


@triton.jit
def _put(out_ptr, value, row, column, N: tl.constexpr, K: tl.constexpr, ADDS: tl.constexpr):
    place = out_ptr + row[:, None].to(tl.int64) * K + column[None, :]
    mask = (row < N)[:, None] & (column < K)[None, :]
    if ADDS:
        value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, value.to(out_ptr.dtype.element_ty), mask=mask)


def _tiles(x: Tensor, experts: int, n: int) -> Tiles:
    """Tile sizes for the average number of rows per expert; the actual counts are on the device."""
    if x.dtype == torch.float32:
        return WIDE
    if is_required():
        return LARGE
    rows = x.shape[0] / experts
    if rows >= 4 * HUGE.rows and n >= 4 * HUGE.width:
        return HUGE
    return LARGE if rows > FLAT.rows else FLAT if rows > THIN.rows else THIN


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _addresses(tensors: Tensors) -> tuple[Tensor, bool]:
    """Addresses [E] on the device; True if all are 16-byte aligned."""
    device = tensors[0].device
    return _table(addresses(tensors), device, stream_id(device))


@functools.lru_cache(maxsize=1024)
def _table(addresses: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """Cached: parameter addresses do not change."""
    table = torch.tensor(addresses, dtype=torch.int64, device=device)
    return table, all(each % 16 == 0 for each in addresses)


def _takes_many() -> bool:
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, RuntimeError, AttributeError):  # of older releases, which take one tensor
        return False
    return True


_COUNTS_MANY = _takes_many()
