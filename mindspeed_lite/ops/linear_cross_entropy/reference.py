"""Reference of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_lite.ops.cross_entropy import reference as cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import chunks


def definition(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy.definition(hidden @ weight.t(), target)


def linear_cross_entropy(hidden: Tensor, *arguments: Any) -> Tensor:
    return chunks.linear_cross_entropy(cross_entropy.KERNELS, hidden, *arguments)
