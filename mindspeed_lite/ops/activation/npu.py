"""activation on Ascend NPUs through torch_npu's fused operators and their backward.

Bias is added before and rounded to x's dtype; weights multiply the rounded result in fp32: two roundings more than the
reference. GeGLU is npu_gelu times up, since npu_geglu's backward fails on fake tensors.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.activation import ActivationSpec, Case

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_KINDS = ("swiglu", "geglu", "gelu")


def supported(case: Case) -> list[str]:
    reasons = []
    if case.kind not in _KINDS:
        reasons.append(f"{case.kind}: torch_npu has an operator for {', '.join(_KINDS)}")
    if case.has_clamp_or_offset:
        reasons.append("a limit or an offset of the halves, which torch_npu's operators do not have")
    return reasons


def activation(x: Tensor, bias: Tensor | None, weights: Tensor | None, spec: ActivationSpec) -> Tensor:
    # Documented for up to 8 dimensions.
    rows = x if x.dim() <= 8 else x.reshape(-1, x.shape[-1])  # [..., W]
    if bias is not None:
        rows = rows + bias.to(x.dtype)
    if spec.kind == "swiglu":
        y: Tensor = torch_npu.npu_swiglu(rows, dim=-1)
    elif spec.kind == "geglu":
        gate, up = rows.chunk(2, dim=-1)  # [..., W / 2] each
        y = _gelu(gate) * up
    else:
        y = _gelu(rows)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if weights is None else (y * weights.float()).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    # torch's gelu is documented to ignore `approximate` on NPUs.
    y: Tensor = torch_npu.npu_gelu(x, approximate="tanh")
    return y
