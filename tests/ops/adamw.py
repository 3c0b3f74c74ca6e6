"""Parameters, gradients and moments for the AdamW operator, and its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.ops import adamw as op
from mindspeed_lite.ops.adamw import Rule, halves
from mindspeed_lite.ops.dispatch import force

Lists = list[list[torch.Tensor]]
RULE: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def through(implementation: Any) -> Callable[..., None]:
    """An implementation called as the operator is."""

    def adamw(*lists: Any, outs: Any = None, lows: Any = None, blocks: Any = None, **rule: Any) -> None:
        with torch.no_grad():
            implementation.adamw(op.Lists(*lists, outs, lows, blocks), Rule(**rule))

    return adamw


def on_npu(*lists: Any, **options: Any) -> None:
    """The operator on its NPU backend."""
    with force("adamw", "npu"):
        op.adamw(*lists, **options)


def make(
    sizes: Sequence[int | tuple[int, ...]],
    grad_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = torch.bfloat16,
    seed: int = 0,
) -> Lists:
    """param, grad, exp_avg, exp_avg_sq and out, of the magnitudes of a training run."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(size: int | tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    return [
        [numbers(size) * 0.05 for size in sizes],
        [(numbers(size) * 1e-2).to(grad_dtype) for size in sizes],
        [numbers(size) * 1e-2 for size in sizes],
        # Not near zero, where one element's last bit would decide the error of all.
        [numbers(size).square() * 1e-4 + 1e-5 for size in sizes],
        [torch.full_like(numbers(size), 7.0, dtype=out_dtype or torch.float32) for size in sizes],
    ]


def taken_apart(word: torch.Tensor, keeps_bit: bool = True) -> tuple[torch.Tensor, ...]:
    high, low = torch.empty(word.shape, dtype=torch.bfloat16), torch.empty(word.shape, dtype=torch.int16)
    squares = torch.zeros(word.shape) if keeps_bit else None
    halves.split(word, high, low, squares)
    return high, low, squares
