"""Implementations that linear_cross_entropy is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case, movable
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    labels = _labels(case)
    return lambda x, weight: linear_cross_entropy(x, weight, labels(x))


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us has: all logits at once."""
    labels = _labels(case)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, weight)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, labels(x), reduction="none")

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's, with a loss for each row and the weight's gradient summed in fp32, both as ours."""
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function: Any = module.LigerFusedLinearCrossEntropyFunction
    labels = _labels(case)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = function.apply(
            x, weight, labels(x), None, None, -100, 0.0, 0.0, "none", None, False, torch.float32
        )[0]
        return loss

    return run


def _labels(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    rows, _, width = case.shape
    return movable(torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(2)))
