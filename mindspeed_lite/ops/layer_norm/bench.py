"""Implementations that layer_norm is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case
from mindspeed_lite.ops.layer_norm.cases import EPS


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us calls."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, EPS)

    return run
