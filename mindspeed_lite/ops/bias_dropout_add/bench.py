"""Implementations that bias_dropout_add is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron writes."""
    p = case.shape.p

    def run(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return residual + torch.nn.functional.dropout(x + bias, p=p)

    return run
