"""Implementations that grouped_matmul is compared with; cases.py declares the cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case, OwnLayout
from mindspeed_lite.ops.grouped_matmul import grouped_matmul


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    counts = _uneven(case)
    return lambda x, *weights: grouped_matmul(x, weights, counts)


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us has."""
    counts = _uneven(case)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(x, counts), weights, strict=True)
        return torch.cat([torch.nn.functional.linear(rows, weight) for rows, weight in parts])

    return run


def grouped_mm(case: Case) -> Callable[..., torch.Tensor]:
    """PyTorch's, on one tensor of all weights, as a model made for it holds them."""
    product: Callable[..., torch.Tensor] = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
    ends = torch.tensor(list(itertools.accumulate(_uneven(case))), dtype=torch.int32, device=case.device)
    return OwnLayout(
        lambda x, *weights: (x.clone(), torch.stack(weights)),
        lambda x, weights: product(x, weights.transpose(1, 2), offs=ends),
        "the weights are one tensor, stacked beforehand",
    )


def _uneven(case: Case) -> list[int]:
    """Rows of every expert, the last of which has none (unless it is the only one)."""
    rows, _, _, experts = case.shape
    if experts == 1:
        return [rows]
    generator = torch.Generator().manual_seed(2)
    odds = torch.randn(experts - 1, generator=generator).softmax(0)
    chosen = torch.multinomial(odds, rows, replacement=True, generator=generator)
    return [*chosen.bincount(minlength=experts - 1).tolist(), 0]
