"""activation on CUDA: one Triton kernel per direction, one pass over memory each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.activation import Case
from mindspeed_lite.ops.activation.reference import ActivationSpec
from mindspeed_lite.ops.row_kernels import cdiv, next_power_of_2, on
from mindspeed_lite.ops.rows import as_rows

# Columns per step: 16 bytes per thread of four warps, in 16 bit.
_BLOCK = 1024


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    if torch.float64 in (case.bias_dtype, case.weights_dtype):
        return ["bias or weights in float64, which the kernel would round to float32"]
    return []


def activation(x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec) -> Tensor:
    y: Tensor = autograd.apply(_KERNEL, (x, bias, weights), spec)
    return y


def _forward(inputs: Any, spec: ActivationSpec) -> tuple[Tensor, autograd.Inputs]:
    x, bias, weights = inputs
    rows, stride = as_rows(x)
    half = x.shape[-1] // 2 if spec.is_gated else x.shape[-1]
    y = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    if y.numel():
        grid, block, warps = _launch(x.shape[:-1].numel(), half, whole_rows=False)
        with on(x):
            forward_kernel[grid](
                rows, bias, _packed(weights), y, stride, spec.linear_offset, spec.clamp or 0.0,
                HALF=half, KIND=spec.kind, GATED=spec.is_gated, BENT=_bent(spec),
                HAS_BIAS=bias is not None, HAS_WEIGHTS=weights is not None,
                PIECES=grid[1], BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return y, inputs


def _backward(dy: Tensor, saved: Any, spec: ActivationSpec, wanted: Sequence[bool]) -> autograd.Inputs:
    x, bias, weights = saved
    rows, stride = as_rows(x)
    width = x.shape[-1]
    half = width // 2 if spec.is_gated else width
    number = x.shape[:-1].numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweights = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if wanted[2] else None
    if dx.numel():
        grid, block, warps = _launch(number, half, whole_rows=wanted[2])
        with on(x):
            backward_kernel[grid](
                dy.contiguous(), rows, bias, _packed(weights), dx, dweights, stride, spec.linear_offset,
                spec.clamp or 0.0, HALF=half, KIND=spec.kind, GATED=spec.is_gated, BENT=_bent(spec),
                HAS_BIAS=bias is not None, HAS_WEIGHTS=weights is not None, WANTS_DWEIGHTS=wanted[2],
                PIECES=grid[1], BLOCK=block, num_warps=warps,
            )  # fmt: skip
    elif dweights is not None:
        dweights.zero_()  # rows without columns
    dbias = None
    if wanted[1]:
        # Sums the rounded gradient, like autograd, in torch's deterministic order.
        dbias = dx.view(number, width).sum(0, dtype=torch.float32).to(bias.dtype)
    return dx, dbias, None if dweights is None else dweights.to(weights.dtype)


_KERNEL = autograd.Kernel(_forward, _backward)


def _packed(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _bent(spec: ActivationSpec) -> int:
    """Bit 0: clamp; bit 1: offset of the linear half."""
    return (spec.clamp is not None) + 2 * (spec.linear_offset != 0.0)


def _launch(rows: int, half: int, whole_rows: bool) -> tuple[tuple[int, int], int, int]:
    """Grid (rows, pieces per row), columns per piece, warps."""
    block = min(_BLOCK, next_power_of_2(half))
    # Weight gradients are sums over whole rows.
    pieces = 1 if whole_rows else min(cdiv(half, block), 65535)
    return (rows, pieces), block, max(1, block // 256)


# ---- kernels ----


@triton.jit
def _swish(x, t, dt):
    """x * s with s = sigmoid(t(x)), and its derivative; the smaller of s and 1 - s is not subtracted."""
    e = tl.exp(-tl.abs(t))
    larger = 1.0 / (1.0 + e)
    smaller = e * larger
    s = tl.where(t < 0.0, smaller, larger)
    return x * s, s + x * (larger * smaller) * dt


@triton.jit
def _point(x, KIND: tl.constexpr):
    """f(x) and f'(x)."""
    if KIND == "swiglu":
        value, slope = _swish(x, x, 1.0)
    elif KIND == "quick_geglu":
        value, slope = _swish(x, 1.702 * x, 1.702)
    elif KIND == "squared_relu":
        positive = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        value, slope = positive * positive, 2.0 * positive
    else:
        # (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel for large negative x.
        c = 1.5957691216057308  # 2 sqrt(2 / pi)
        square = x * x
        value, slope = _swish(x, c * x * (1.0 + 0.044715 * square), c * (1.0 + 0.134145 * square))
    return value, slope


@triton.jit
def _read(x, bias, columns, mask, HAS_BIAS: tl.constexpr):
    wide = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        wide += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return wide


@triton.jit
def _linear(up, linear_offset, clamp, BENT: tl.constexpr):
    if BENT % 2 == 1:
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    if BENT >= 2:
        up += linear_offset
    return up


@triton.jit
def forward_kernel(
    x, bias, weights, y, stride, linear_offset, clamp,
    HALF: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BENT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    y += row * HALF
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(weights + row).to(tl.float32)
    for start in range(0, HALF, BLOCK * PIECES):
        columns = tl.program_id(1) * BLOCK + start + tl.arange(0, BLOCK)
        mask = columns < HALF
        gate = _read(x, bias, columns, mask, HAS_BIAS)
        if BENT % 2 == 1:
            gate = tl.where(gate > clamp, clamp, gate)
        out, _ = _point(gate, KIND)
        if GATED:
            out *= _linear(_read(x, bias, HALF + columns, mask, HAS_BIAS), linear_offset, clamp, BENT)
        tl.store(y + columns, (out * weight).to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy, x, bias, weights, dx, dweights, stride, linear_offset, clamp,
    HALF: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BENT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, WANTS_DWEIGHTS: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    dy += row * HALF
    dx += row * HALF * (2 if GATED else 1)
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, HALF, BLOCK * PIECES):
        columns = tl.program_id(1) * BLOCK + start + tl.arange(0, BLOCK)
        mask = columns < HALF
        gradient = tl.load(dy + columns, mask=mask, other=0.0).to(tl.float32)
        raw_gate = _read(x, bias, columns, mask, HAS_BIAS)
        gate = raw_gate
        if BENT % 2 == 1:
            gate = tl.where(raw_gate > clamp, clamp, raw_gate)
        value, slope = _point(gate, KIND)
        if GATED:
            raw_up = _read(x, bias, HALF + columns, mask, HAS_BIAS)
            up = _linear(raw_up, linear_offset, clamp, BENT)
            dgate = gradient * slope * up
            dup = gradient * value
            total += dup * up
            if BENT % 2 == 1:
                # Clamped values have no gradient.
                dgate = tl.where(raw_gate > clamp, 0.0, dgate)
                dup = tl.where(tl.abs(raw_up) > clamp, 0.0, dup)
            tl.store(dx + HALF + columns, (dup * weight).to(dx.dtype.element_ty), mask=mask)
        else:
            dgate = gradient * slope
            total += gradient * value
        tl.store(dx + columns, (dgate * weight).to(dx.dtype.element_ty), mask=mask)
    if WANTS_DWEIGHTS:
        tl.store(dweights + row, tl.sum(total))
