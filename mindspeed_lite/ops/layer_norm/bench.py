"""Implementations that layer_norm is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case
from mindspeed_lite.ops.layer_norm.cases import EPS


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us calls."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, EPS)

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's."""
    function: Any = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias: function.apply(x, weight, bias, EPS)
