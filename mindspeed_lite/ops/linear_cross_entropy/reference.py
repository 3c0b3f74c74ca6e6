"""Reference of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.ops.cross_entropy import reference as cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import chunks


def definition(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy.definition(hidden @ weight.t(), target)


def linear_cross_entropy(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return chunks.linear_cross_entropy(cross_entropy.KERNELS, hidden, *arguments)
