"""moe_router on Ascend NPUs: torch_npu's gating operators with our gradient.

Inference operators, here with fp32 logits. npu_moe_gating_top_k documents that ties go to the lowest experts;
npu_moe_gating_top_k_softmax leaves them open, like torch.topk. Arbitrary numbers of experts and groups need CANN 8.3.
Undocumented uses (softmax of the chosen logits, other scores, choice by normalised scores) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.moe_router import Case, reference
from mindspeed_lite.ops.moe_router.reference import EPS, PRE_SOFTMAX, SIGMOID, SOFTMAX, Form, Groups

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Documented limits.
_MOST_EXPERTS = 2048
_MOST_CHOSEN = 1024
_LANES = 32


def supported(case: Case) -> list[str]:
    return _softmax(case.form) if case.form.scores == PRE_SOFTMAX else _sigmoid(case.form, case.experts)


def _softmax(form: Form) -> list[str]:
    reasons = []
    if form.groups is not None:
        reasons.append("groups of experts chosen by a softmax: npu_moe_gating_top_k_softmax has no groups")
    if form.topk > _MOST_CHOSEN:
        reasons.append(f"{form.topk} experts for a token: npu_moe_gating_top_k_softmax takes {_MOST_CHOSEN}")
    return reasons


def _sigmoid(form: Form, experts: int) -> list[str]:
    if form.scores == SOFTMAX:
        return ["the softmax of the chosen logits: torch_npu's operators choose by the softmax of all of them"]
    if form.scores != SIGMOID:
        return [f"{form.scores}: torch_npu's operators have softmax and sigmoid"]
    reasons = []
    if form.topk == 1:
        reasons.append("one expert for a token: npu_moe_gating_top_k divides its score by itself")
    groups = form.groups or Groups(1, 1, 1)
    size = experts // groups.number
    if groups.best > 2:
        reasons.append(f"groups judged by their {groups.best} best experts: npu_moe_gating_top_k takes one or two")
    if size <= 2 or -(-size // _LANES) * _LANES * groups.number > _MOST_EXPERTS:
        reasons.append(
            f"{groups.number} groups of {size} experts: npu_moe_gating_top_k wants more than 2 in each, and at most "
            f"{_MOST_EXPERTS} in all, each group filled up to a multiple of {_LANES}"
        )
    return reasons


def moe_router(logits: Tensor, expert_bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or logits.shape[0] == 0:
        return reference.moe_router(logits, expert_bias, form)
    probs, chosen = autograd.apply(_KERNEL, (logits, expert_bias), (form, logits.shape[1]))
    return probs, chosen


def _forward(inputs: Any, options: tuple[Form, int]) -> tuple[tuple[Tensor, ...], autograd.Inputs]:
    (logits, expert_bias), (form, _) = inputs, options
    x = logits.to(torch.float32)  # [T, E]
    if form.scores == PRE_SOFTMAX:
        probs, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(x, finished=None, k=form.topk)
        probs = probs * form.scale
    else:
        groups = form.groups or Groups(1, 1, 1)
        probs, experts, _ = torch_npu.npu_moe_gating_top_k(
            x,
            form.topk,
            bias=None if expert_bias is None else expert_bias.to(torch.float32),
            k_group=groups.chosen,
            group_count=groups.number,
            group_select_mode=groups.best - 1,  # 0: highest score, 1: sum of the two highest
            renorm=0,
            norm_type=1,  # sigmoid
            out_flag=False,
            routed_scaling_factor=form.scale,
            eps=EPS,
        )
    probs, indices = probs.to(logits.dtype), experts.to(torch.int64)  # [T, topk]
    saved = (indices, logits if form.scores == PRE_SOFTMAX else torch.sigmoid(x.gather(1, indices)))
    wide = logits.new_zeros(logits.shape).scatter_(1, indices, probs)
    return (wide, reference.routing_map(logits, indices)), saved


def _backward(dprobs: Tensor, saved: Any, options: tuple[Form, int], wanted: Sequence[bool]) -> autograd.Inputs:
    (indices, kept), (form, experts) = saved, options
    g = dprobs.gather(1, indices).to(torch.float32) * form.scale  # [T, topk]
    if form.scores == PRE_SOFTMAX:
        p = torch.softmax(kept, dim=-1, dtype=torch.float32)  # [T, E]
        g = g * p.gather(1, indices)
        dlogits = (p * -g.sum(dim=-1, keepdim=True)).scatter_add_(1, indices, g)
        return dlogits.to(dprobs.dtype), None
    total = kept.sum(dim=-1, keepdim=True) + EPS
    d = (g - (g * kept).sum(dim=-1, keepdim=True) / total) / total * kept * (1 - kept)
    return dprobs.new_zeros(dprobs.shape[0], experts).scatter_(1, indices, d.to(dprobs.dtype)), None


_KERNEL = autograd.Kernel(_forward, _backward)
