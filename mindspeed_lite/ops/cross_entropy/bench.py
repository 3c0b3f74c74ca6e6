"""Implementations that cross_entropy is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case, OwnLayout, movable
from mindspeed_lite.ops.cross_entropy import cross_entropy


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    labels = _labels(case)
    return lambda logits: cross_entropy(logits, labels(logits))


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron's loss is without parallel ranks."""
    labels = _labels(case)

    def run(logits: torch.Tensor) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(wide, labels(logits), reduction="none")

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's."""
    function: Any = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    labels = _labels(case)

    def run(logits: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = function.apply(logits, labels(logits), None, -100, 0.0, 0.0, "none")[0]
        return loss

    return OwnLayout(
        lambda logits: (logits.clone(),),
        run,
        "the logits are its own: the forward pass writes their gradient over them",
    )


def _labels(case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    rows, width = case.shape
    return movable(torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(2)))
