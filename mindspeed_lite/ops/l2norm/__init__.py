"""2-norm of a list of tensors, for gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.l2norm import reference

__all__ = ["OPERATOR", "Case", "l2norm"]


class Case(NamedTuple):
    device: str


# PyTorch's foreach norm is the fastest on every device.
OPERATOR = Operator("l2norm", reference.l2norm)


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """sqrt(sum of squares of all elements), a 0-d fp32 tensor.

    tensors: at least one, on one device, any floating-point dtypes. float64 if all are. No synchronisation, no
    gradient.
    """
    if not tensors:
        raise ValueError("l2norm: want at least one tensor")
    return OPERATOR.choose(Case(tensors[0].device.type))(tensors)
