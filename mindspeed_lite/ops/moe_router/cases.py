"""moe_router: against the same steps one by one, as Megatron computes them without Transformer Engine.

The output is the probabilities [T, E]; the map is computed beside them. The logits of a token differ from each other:
among equal ones, and among those that only float64 tells apart, devices may choose differently.

Counted as bytes: forward reads the logits and writes probabilities and map; backward reads the chosen gradients and
writes that of the logits. Counted as operations on each logit: 8 for its score, and one comparison for each expert that
is looked for and each group; backward as many for a score as forward. None of them is a matmul's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mindspeed_lite.ops.case import OURS, TORCH, Case, Cases, Work, by_case, contenders, itemsize

# As the operator names them.
_SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_PATTERN = re.compile(
    r"([1-9]\d*)[xX]([1-9]\d*),k=([1-9]\d*)(?:,scores=(\w+))?(,pre=1)?(?:,groups=([1-9]\d*)/([1-9]\d*))?(,bias=1)?"
)


class Shape(NamedTuple):
    """Tokens, experts and how many of these each takes; the score; `chosen` of `groups`, or 0 of 0; an expert bias."""

    tokens: int
    experts: int
    topk: int
    function: str
    pre: bool
    groups: int
    chosen: int
    bias: bool


def case(text: str, device: str, dtype: str) -> Case:
    """The case of `TOKENSxEXPERTS,k=TOPK[,scores=FUNCTION][,pre=1][,groups=NUMBER/CHOSEN][,bias=1]`."""
    match = _PATTERN.fullmatch(text)
    function = (match[4] or "softmax") if match else ""
    if match is None or function not in _SCORE_FUNCTIONS:
        raise ValueError(
            "want TOKENSxEXPERTS,k=TOPK and, if wanted in this order, "
            f"scores={'|'.join(_SCORE_FUNCTIONS)}, pre=1, groups=NUMBER/CHOSEN, bias=1; for example 4096x64,k=6"
        )
    tokens, experts, topk = (int(match[each]) for each in (1, 2, 3))
    pre, biased = bool(match[5]), bool(match[8])
    groups, chosen = (int(match[6]), int(match[7])) if match[6] else (0, 0)
    if topk > experts or (groups and (experts % groups or not chosen <= groups or topk < chosen)):
        raise ValueError(f"{topk} of {experts} experts in {chosen} of {groups} groups")
    size, count = itemsize(dtype), tokens * experts
    forward = Work(count * (2 * size + 1), count * (8 + topk + groups))
    backward = Work(count * size + tokens * topk * size, 8 * count)
    details = "".join([" pre-softmax" * pre, f" groups {groups}/{chosen}" if groups else "", " bias" * biased])
    return Case(
        operator="moe_router",
        name=f"{tokens}x{experts} top {topk} {function}{details} {dtype}",
        shape=Shape(tokens, experts, topk, function, pre, groups, chosen, biased),
        device=device,
        dtype=dtype,
        inputs=(),
        forward=forward,
        both=forward + backward,
        contenders=contenders(by_case(OURS, "ours"), by_case(TORCH, "plain")),
    )


# Mixtral, a model of 64 experts in both ways, and DeepSeek-V3.
_DEEPSEEK = ",k=8,scores=sigmoid,groups=8/4,bias=1"
_CPU = ("2048x8,k=2", "4096x64,k=6", "4096x64,k=6,pre=1", f"8192x256{_DEEPSEEK}")

CASES = Cases(
    syntax="TOKENSxEXPERTS,k=TOPK and, if wanted in this order, scores=FUNCTION (softmax), pre=1, "
    "groups=NUMBER/CHOSEN, bias=1",
    example="4096x64,k=6",
    case=case,
    cpu=_CPU,
    accelerator=(*_CPU, f"32768x256{_DEEPSEEK}"),
    quick=("512x64,k=6",),
    tiny=(
        "64x16,k=2,pre=1",
        "24x48,k=4",
        "24x48,k=4,pre=1,groups=4/2",
        "24x48,k=4,scores=sigmoid,groups=4/2,bias=1",
        "24x48,k=1,scores=sqrtsoftplus",
    ),
    numerics=("64x64,k=6,pre=1", "100x64,k=8,scores=sigmoid,groups=8/4,bias=1", "37x60,k=4,scores=sigmoid"),
)
