"""Fused scale, mask and softmax for attention that materialises its score matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import CANN, TORCH
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.masked_softmax import reference

__all__ = ["OPERATOR", "Case", "masked_softmax", "why_not"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Case(NamedTuple):
    device: str
    dtype: torch.dtype
    is_tiled: bool
    """Whether queries and keys are multiples of 32 in number, and at most 4096."""
    is_scaled: bool
    """Whether the scale is another than 1."""


OPERATOR = Operator(
    "masked_softmax", reference.masked_softmax, batch_dependence={"reference": TORCH, "cpu": "", "npu": CANN}
)


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0) -> Tensor:
    """p = softmax(scale * scores, hidden entries set to -10000) over the last dimension.

    scores, p: [b, n, sq, sk] in bf16, fp16, fp32 or fp64. mask: bool, broadcastable; True hides. causal: query i hides
    keys j > i; needs sq 1 (sees all) or sk. Computed in fp32 (float64 for float64), rounded once.

    As in Megatron, hidden entries are -10000: a fully hidden query gets a uniform row (on NPUs it sees all keys). Their
    gradient is zero. NaN and infinity act as in torch.softmax.

    The CPU kernel saves scores, mask and two fp32 values per row, and is deterministic. An NPU saves probabilities and
    a mask. Raises ValueError.
    """
    return OPERATOR.choose(_case(scores, mask, causal, scale), scores, mask)(scores, mask, causal, scale)


def why_not(scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0) -> list[str]:
    """Reasons why this call would run on the reference; empty if none."""
    return OPERATOR.why_not(_case(scores, mask, causal, scale))


def _case(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Case:
    shape = scores.shape
    if len(shape) != 4:
        raise ValueError(f"masked_softmax: want scores [b, n, sq, sk], not {list(shape)}")
    if scores.dtype not in _DTYPES:
        raise ValueError(f"masked_softmax: scores are {scores.dtype}, not one of {', '.join(map(str, _DTYPES))}")
    if causal and shape[2] > 1 and shape[2] != shape[3]:
        raise ValueError(f"masked_softmax: causal wants as many queries as keys, or one, not {shape[2]} and {shape[3]}")
    if not math.isfinite(scale):
        raise ValueError(f"masked_softmax: scale is {scale}, not a finite number")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"masked_softmax: mask is {mask.dtype}, not torch.bool")
        if mask.device != scores.device:
            raise ValueError(f"masked_softmax: mask is on {mask.device}, scores are on {scores.device}")
        sizes = mask.shape
        if len(sizes) > 4 or any(
            size not in (1, wanted) for size, wanted in zip(reversed(sizes), reversed(shape), strict=False)
        ):
            raise ValueError(f"masked_softmax: mask {list(sizes)} does not broadcast to scores {list(shape)}")
    is_tiled = all(size % 32 == 0 and 0 < size <= 4096 for size in shape[2:])
    return Case(scores.device.type, scores.dtype, is_tiled, scale != 1.0)
