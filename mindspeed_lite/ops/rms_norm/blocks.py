"""rms_norm on CPU without a compiled kernel: PyTorch's passes over blocks of rows that stay in cache.

PyTorch composes its CPU rms_norm from about ten whole-tensor operations forward and twenty backward, each of
them a trip to memory. Here a block of rows is widened to fp32 once and every pass runs over that block; both
sums of the backward pass come out of one product p = dy * x, the one over H as a matrix-vector product:

    dw[h]  = sum_r rstd[r] * p[r, h]            c[r] = sum_h p[r, h] * w[h]
    dx     = rstd * w * dy - x * rstd^3 * c / H
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.rms_norm import reference

# Elements in a block: three fp32 buffers of it (6 MiB) stay in a last-level cache, and a pass over it is long
# enough to hide the fixed cost of an operator call and of waking the threads.
_BLOCK = 1 << 19

# Below this many elements everything is in cache anyway and the number of operator calls decides: the plain
# formula makes fewer of them.
_SMALL = 1 << 17


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, zero_centered: bool = False) -> torch.Tensor:
    if x.numel() < _SMALL:
        return reference.rms_norm(x, weight, eps, zero_centered)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: torch.Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, weight, eps, zero_centered)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
        y, rstd = _forward(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = zero_centered
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dx, dw = _backward(dy, x, weight, rstd, ctx.zero_centered, wants_dx, wants_dw)
        return dx, dw, None, None


def _wide(weight: torch.Tensor, zero_centered: bool, dtype: torch.dtype) -> torch.Tensor:
    scale = weight.to(dtype)  # [H]
    return scale + 1 if zero_centered else scale


def _forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = x.shape[-1]
    rows = x.reshape(-1, width)  # [R, H]
    scale = _wide(weight, zero_centered, dtype)  # [H]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = y.view(-1, width)  # [R, H]
    rstd = torch.empty(rows.shape[0], 1, dtype=dtype, device=x.device)
    step = max(1, _BLOCK // width)
    narrow = x.dtype != dtype
    wide = torch.empty(min(step, rows.shape[0]), width, dtype=dtype, device=x.device) if narrow else out
    for start in range(0, rows.shape[0], step):
        x_block, y_block, r = (t[start : start + step] for t in (rows, out, rstd))
        work = wide[: x_block.shape[0]] if narrow else y_block
        if narrow:
            # One pass for the sum of squares; its rounding disappears under that of the 16-bit result.
            x_block = work.copy_(x_block)
            torch.linalg.vector_norm(x_block, dim=-1, keepdim=True, out=r).square_()
        else:
            # torch.sum adds pairwise; the running sums of vector_norm would show in an fp32 result.
            torch.sum(torch.mul(x_block, x_block, out=work), dim=-1, keepdim=True, out=r)
        r.div_(width).add_(eps).rsqrt_()
        torch.mul(x_block, r, out=work).mul_(scale)
        if narrow:
            y_block.copy_(work)
    return y, rstd


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    wants_dx: bool,
    wants_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dtype = rstd.dtype
    width = x.shape[-1]
    rows, grads = x.reshape(-1, width), dy.reshape(-1, width)  # [R, H]
    scale = _wide(weight, zero_centered, dtype)  # [H]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants_dx else None
    step = max(1, _BLOCK // width)
    count = -(-rows.shape[0] // step)
    dw = torch.empty(count, width, dtype=dtype, device=x.device) if wants_dw else None  # a row per block
    narrow = x.dtype != dtype
    shape = (min(step, rows.shape[0]), width)
    product = torch.empty(shape, dtype=dtype, device=x.device)
    wide_x = torch.empty(shape, dtype=dtype, device=x.device) if narrow else product
    wide_dy = torch.empty(shape, dtype=dtype, device=x.device) if narrow else product
    for block, start in enumerate(range(0, rows.shape[0], step)):
        x_block, dy_block, r = (t[start : start + step] for t in (rows, grads, rstd))
        size = x_block.shape[0]
        if narrow:
            x_block = wide_x[:size].copy_(x_block)
            dy_block = wide_dy[:size].copy_(dy_block)
        p = torch.mul(x_block, dy_block, out=product[:size])
        if dx is not None:
            c = torch.mv(p, scale)[:, None].mul_(r).mul_(r).mul_(r).div_(width)  # [size, 1]
            dx_block = dx.view(-1, width)[start : start + step]
            work = dy_block if narrow else dx_block
            torch.mul(dy_block, scale, out=work).mul_(r).addcmul_(x_block, c, value=-1)
            if narrow:
                dx_block.copy_(work)
        if dw is not None:
            # Not as a matrix-vector product: that runs down the rows with one sum, torch.sum adds pairwise.
            torch.sum(p.mul_(r), dim=0, out=dw[block])
    return dx, None if dw is None else dw.sum(0).to(weight.dtype)
