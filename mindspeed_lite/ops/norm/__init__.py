"""Shared code of rms_norm and layer_norm: rms_norm is layer_norm without mean and bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import CANN, TORCH
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.norm import reference


class Case(NamedTuple):
    """Weight and bias have one dtype."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    zero_centered: bool
    has_bias: bool


def run(operator: Operator, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    case = Case(x.device.type, x.dtype, weight.dtype, zero_centered, bias is not None)
    out: Tensor = operator.choose(case)(x, weight, bias, eps, zero_centered)
    return out


def operator(name: str) -> Operator:
    return Operator(name, reference.norm, batch_dependence={"reference": TORCH, "cpu": "", "cuda": "", "npu": CANN})
