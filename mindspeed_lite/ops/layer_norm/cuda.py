"""layer_norm on CUDA: see `ops.norm_cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_lite.ops import norm_cuda
from mindspeed_lite.ops.layer_norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.layer_norm import Case


def supported(case: Case) -> list[str]:
    return norm_cuda.reasons(case)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centered: bool = False) -> Tensor:
    def by_torch(factor: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, factor, bias, eps)

    def by_reference() -> Tensor:
        return reference.layer_norm(x, weight, bias, eps, zero_centered)

    return norm_cuda.norm("layer_norm", x, weight, bias, eps, zero_centered, by_torch, by_reference)
