"""The sigmoid approximation of GELU, for the MLP of a transformer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.batch_invariant import CANN
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.my_op import reference

__all__ = ["OPERATOR", "Case", "my_op"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype


# A device without a file uses the reference.
OPERATOR = Operator("my_op", reference.my_op, batch_dependence={"reference": "", "npu": CANN})


def my_op(x: torch.Tensor) -> torch.Tensor:
    """y = x * sigmoid(1.702 x).

    x: [...], floating point, any strides; y: [...] in x's dtype. Computed in fp32 (float64 for a float64 x) and rounded
    once. For the backward pass x is kept.
    """
    if not x.is_floating_point():
        raise ValueError(f"my_op: want x in floating point, not {x.dtype}")
    return OPERATOR.choose(Case(x.device.type, x.dtype))(x)
