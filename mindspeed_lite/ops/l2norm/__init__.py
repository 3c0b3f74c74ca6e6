"""The 2-norm of a list of tensors as if they were one, for gradient clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.l2norm import reference

__all__ = ["OPERATOR", "Case", "l2norm"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str


# PyTorch's norms of a list are the best there is on every device.
OPERATOR = Operator("l2norm", reference.l2norm)


@torch.no_grad()
def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(sum of the squares of all elements of all tensors), a tensor without dimensions, in fp32.

    tensors: at least one, on one device, any shapes, strides and floating-point dtypes. Summed in fp32 (float64, with a
    float64 result, where all tensors are). Nothing is read back to the host. No gradient.
    """
    if not tensors:
        raise ValueError("l2norm: want at least one tensor")
    return OPERATOR.choose(Case(tensors[0].device.type))(tensors)
