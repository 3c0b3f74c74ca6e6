"""Kernels by which test_triton_compile.py sees that its measure tells them apart."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled(x, y, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def total(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y, tl.sum(tl.load(x + at, mask=at < n, other=0.0)))


@triton.jit
def wrong(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK))
