"""Implementations that masked_softmax is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case, movable
from mindspeed_lite.ops.masked_softmax import masked_softmax


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    if case.shape.causal:
        return lambda scores: masked_softmax(scores, causal=True)
    mask = movable(_mask(case))
    return lambda scores: masked_softmax(scores, mask(scores))


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """Megatron's steps, in fp32 for 16 bits."""
    mask, dtype = movable(_mask(case)), case.torch_dtype

    def run(scores: torch.Tensor) -> torch.Tensor:
        if dtype.itemsize > 2:
            return scores.masked_fill(mask(scores), -10000.0).softmax(-1)
        return scores.float().masked_fill_(mask(scores), -10000.0).softmax(-1).to(dtype)

    return run


def _mask(case: Case) -> torch.Tensor:
    """True where the key is hidden."""
    batch, _, queries, keys, causal = case.shape
    if causal:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool).triu(1)
    mask = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(2)) < 0.25
    mask[..., 0] = False  # no row is hidden whole
    return mask
