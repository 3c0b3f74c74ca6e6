"""masked_softmax on CPU: from scores to probabilities, and from gradient to gradient, row by row in C++."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import native
from mindspeed_lite.ops.masked_softmax import reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.masked_softmax import Case

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_SIZES = "lllllllifi"
library = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {f"masked_softmax_forward_{name}": f"pppp{_SIZES}" for name in _NAMES.values()}
    | {f"masked_softmax_backward_{name}": f"ppppp{_SIZES}" for name in _NAMES.values()},
    returns_status=True,
)

# An exponential makes a score cost as much as so many elements of a pass over memory.
_WORK = 4


def supported(case: Case) -> list[str]:
    if case.dtype not in _NAMES:
        return [f"dtype {case.dtype}: the kernel takes bfloat16, float16 and float32"]
    reason = library.unusable()
    return [] if reason is None else [reason]


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    if is_traced(scores) or (mask is not None and is_traced(mask)):
        # A compiler fuses the definition itself, and what has no memory cannot be handed to a kernel.
        return reference.masked_softmax(scores, mask, causal, scale)
    if torch.is_grad_enabled() and scores.requires_grad:
        probs: torch.Tensor = _MaskedSoftmax.apply(scores, mask, causal, scale)  # type: ignore[no-untyped-call]
        return probs
    return _forward(scores.detach(), mask, causal, scale, None)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
        # Per row: the maximum, and the sum of exponentials relative to it. Their logarithm would be one number, but
        # beside a large maximum most of its digits would be lost.
        statistics = torch.empty(2, *scores.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(scores, mask, statistics)
        ctx.causal, ctx.scale = causal, scale
        return _forward(scores, mask, causal, scale, statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scores, mask, statistics = ctx.saved_tensors
        return _backward(dprobs, scores, mask, statistics, ctx.causal, ctx.scale), None, None, None


def _forward(
    scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, statistics: torch.Tensor | None
) -> torch.Tensor:
    scores = scores.contiguous()
    probs = torch.empty(scores.shape, dtype=scores.dtype)
    hidden, sizes = _sizes(scores, mask, causal, scale)
    getattr(library, f"masked_softmax_forward_{_NAMES[scores.dtype]}")(scores, hidden, probs, statistics, *sizes)
    return probs


def _backward(
    dprobs: torch.Tensor,
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    statistics: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    scores, dprobs = scores.contiguous(), dprobs.contiguous()
    dscores = torch.empty(scores.shape, dtype=scores.dtype)
    hidden, sizes = _sizes(scores, mask, causal, scale)
    given = (dprobs, scores, hidden, dscores, statistics)
    getattr(library, f"masked_softmax_backward_{_NAMES[scores.dtype]}")(*given, *sizes)
    return dscores


def _sizes(
    scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor | None, tuple[float, ...]]:
    """The mask with its keys side by side, and what follows the addresses in a call."""
    batch, heads, queries, keys = scores.shape
    strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = mask.detach().expand(*mask.shape[:-1], keys)
        if mask.dim() and mask.stride(-1) != 1:
            mask = mask.contiguous()
        strides = mask.expand(scores.shape).stride()[:3]
    last = (causal and queries > 1, scale, native.threads(_WORK * scores.numel()))
    return mask, (batch, heads, queries, keys, *strides, *last)
