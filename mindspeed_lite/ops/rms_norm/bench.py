"""Implementations that rms_norm is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case
from mindspeed_lite.ops.rms_norm.cases import EPS


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """x, and a weight to which 1 can be added without rounding."""
    rows, hidden, _ = case.shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, hidden, generator=generator).to(case.device, case.torch_dtype)
    weight = (1 + 0.1 * torch.randn(hidden, generator=generator)).to(case.device, case.torch_dtype) - 1
    return x.requires_grad_(), weight.requires_grad_()


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us calls."""
    zero_centered = case.shape.zero_centered

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), 1 + weight if zero_centered else weight, EPS)

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's."""
    function: Any = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    offset = float(case.shape.zero_centered)
    # The rounding of Gemma's norm (all in fp32, as ours), and a gradient of its own, not in place of dy: the same dy
    # serves every call here.
    return lambda x, weight: function.apply(x, weight, EPS, offset, "gemma", False)


def transformer_engine(case: Case) -> Callable[..., torch.Tensor]:
    """Transformer Engine's module."""
    module: Any = importlib.import_module("transformer_engine.pytorch")
    norms: dict[int, Any] = {}

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = norms.get(id(weight))
        if norm is None:
            # It owns its weight; ours in its place makes its gradient the one that is compared.
            norm = module.RMSNorm(x.shape[-1], eps=EPS, device=x.device, dtype=case.torch_dtype)
            del norm.weight
            norm.weight = weight
            norms.clear()
            norms[id(weight)] = norm
        out: torch.Tensor = norm(x)
        return out

    return run
