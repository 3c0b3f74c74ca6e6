"""Reference of linear_cross_entropy."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lite.ops.cross_entropy import reference as cross_entropy


def definition(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy.definition(hidden @ weight.t(), target)
