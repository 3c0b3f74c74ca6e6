"""masked_softmax on CPU: C++ kernels, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES

# Cost of an exponential in elements of a memory pass.
_WORK = 4


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    probs: Tensor = autograd.apply(_KERNEL, (scores, mask), (causal, scale))
    return probs


def _forward(inputs: Any, options: tuple[bool, float]) -> tuple[Tensor, autograd.Inputs]:
    scores, mask = inputs
    given = scores.contiguous()
    probs = torch.empty(scores.shape, dtype=scores.dtype)
    # Maximum and relative sum per row: log(sum) would lose digits to a large maximum.
    statistics = torch.empty(2, *scores.shape[:-1], dtype=torch.float32)
    hidden, sizes = _sizes(scores, mask, *options)
    LIBRARY.kernel("forward", scores.dtype)(given, hidden, probs, statistics, *sizes)
    return probs, (scores, mask, statistics)


def _backward(dprobs: Tensor, saved: Any, options: tuple[bool, float], wanted: Sequence[bool]) -> autograd.Inputs:
    scores, mask, statistics = saved
    scores, dprobs = scores.contiguous(), dprobs.contiguous()
    dscores = torch.empty(scores.shape, dtype=scores.dtype)
    hidden, sizes = _sizes(scores, mask, *options)
    given = (dprobs, scores, hidden, dscores, statistics)
    LIBRARY.kernel("backward", scores.dtype)(*given, *sizes)
    return dscores, None


_KERNEL = autograd.Kernel(_forward, _backward)


def _sizes(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor | None, tuple[float, ...]]:
    batch, heads, queries, keys = scores.shape
    strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = mask.detach().expand(*mask.shape[:-1], keys)
        if mask.dim() and mask.stride(-1) != 1:
            mask = mask.contiguous()
        strides = mask.expand(scores.shape).stride()[:3]
    last = (causal and queries > 1, scale, native.threads(_WORK * scores.numel()))
    return mask, (batch, heads, queries, keys, *strides, *last)
