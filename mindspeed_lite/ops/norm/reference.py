"""Reference of rms_norm and layer_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops.rows import precision


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, zero_centered: bool = False
) -> Tensor:
    dtype = precision(x.dtype)
    centred = x.to(dtype)  # [..., H]
    if bias is not None:
        centred = centred - centred.mean(-1, keepdim=True)
    scale = weight.to(dtype)  # [H]
    if zero_centered:
        scale = scale + 1
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    y = centred * rstd * scale
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)
