"""rms_norm on Ascend NPUs through torch_npu's fused operators.

The plain one brings its own backward. The one with a residual has none, so that the backward of the plain one is called
for it, with the sum in x's place.

With `zero_centered` and a 16-bit weight, 1 + weight is rounded to the weight's dtype before it is multiplied:
the operator wants x and weight in one dtype, and this is one rounding more than the definition has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from mindspeed_lite.ops.rms_norm import Case


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: npu_rms_norm takes float16, bfloat16 and float32")
    if case.weight_dtype != case.dtype:
        reasons.append(f"weight is {case.weight_dtype} and x {case.dtype}: npu_rms_norm takes one dtype")
    return reasons


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Any:
    # The operators document 2 to 8 dimensions.
    rows = x if 2 <= x.dim() <= 8 else x.reshape(-1, x.shape[-1])  # [..., H]
    if residual is not None:
        gamma = weight + 1 if zero_centered else weight
        y, total = _AddRMSNorm.apply(rows, residual.reshape(rows.shape), gamma, eps)  # type: ignore[no-untyped-call]
        return y.view(x.shape), total.view(x.shape)
    y = torch_npu.npu_rms_norm(rows, weight + 1 if zero_centered else weight, epsilon=eps)[0]
    return y.view(x.shape)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd, total = torch_npu.npu_add_rms_norm(x, residual, gamma, epsilon=eps)
        ctx.save_for_backward(total, gamma, rstd)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> Any:
        if dy is None:
            return dsum, dsum, None, None
        total, gamma, rstd = ctx.saved_tensors
        dx, dgamma = torch_npu.npu_rms_norm_backward(dy, total, gamma, rstd)
        if dsum is not None:
            dx = dx + dsum
        return dx, dx, dgamma.to(gamma.dtype), None
