"""moe_router on CUDA: one Triton kernel per direction.

PyTorch computes sigmoid, softplus and softmax before the choice: another rounding would choose other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd
from mindspeed_lite.ops.moe_router import Case, kernels, reference
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, SOFTMAX, Form, Groups
from mindspeed_lite.ops.row_kernels import WIDEST, cdiv, launch, next_power_of_2, on
from mindspeed_lite.ops.rows import as_rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    return [f"{case.experts} experts: a program holds {WIDEST} numbers of a row"] if case.experts > WIDEST else []


def moe_router(logits: Tensor, expert_bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    probs, chosen = autograd.apply(_KERNEL, (logits, expert_bias), (form, logits.shape[1]))
    return probs, chosen


def _forward(inputs: Any, options: tuple[Form, int]) -> tuple[tuple[Tensor, ...], autograd.Inputs]:
    (logits, expert_bias), (form, experts) = inputs, options
    tokens, topk = logits.shape[0], form.topk
    scores = logits if form.scores == SOFTMAX else reference.scores_of(logits, form.scores)
    indices = logits.new_empty((tokens, topk), dtype=torch.int32)
    probs = logits.new_empty(tokens, experts)
    chosen = logits.new_empty((tokens, experts), dtype=torch.bool)
    # The chosen scores, for SOFTMAX their softmax; the softmax over all experts is recomputed from the logits.
    kept = None if form.scores == PRE_SOFTMAX else logits.new_empty((tokens, topk), dtype=torch.float32)
    rows, stride = as_rows(scores)
    groups = form.groups or Groups(1, 1, 1)
    padded = next_power_of_2(groups.number)
    if tokens:
        tile = launch(padded * next_power_of_2(experts // groups.number))
        with on(logits):
            kernels.forward_kernel[(cdiv(tokens, tile.rows),)](
                rows, None if expert_bias is None else expert_bias.contiguous(), indices, probs, chosen, kept,
                tokens, stride, form.scale,
                SCORES=form.scores, NORMALISED=form.normalised, KEEPS=kept is not None,
                GROUPS=groups.number, GROUPS_CHOSEN=groups.chosen, GROUP_BEST=groups.best,
                EXPERTS=experts, TOPK=topk, KBLOCK=next_power_of_2(topk), ROWS=tile.rows, BLOCK=tile.block,
                GBLOCK=padded, num_warps=tile.warps,
            )  # fmt: skip
    return (probs, chosen), (indices, logits if kept is None else kept)


def _backward(dprobs: Tensor, saved: Any, options: tuple[Form, int], wanted: Sequence[bool]) -> autograd.Inputs:
    (indices, kept), (form, experts) = saved, options
    tokens, topk = indices.shape
    grad, stride = as_rows(dprobs)
    dlogits = dprobs.new_empty(tokens, experts)
    if tokens == 0:
        return dlogits, None
    tile = launch(experts)
    grid = (cdiv(tokens, tile.rows),)
    shape = {"EXPERTS": experts, "TOPK": topk, "ROWS": tile.rows, "BLOCK": tile.block, "num_warps": tile.warps}
    with on(dprobs):
        if form.scores == PRE_SOFTMAX:
            logits, logits_stride = as_rows(kept)
            kernels.backward_all_kernel[grid](
                grad, indices, logits, dlogits, tokens, stride, logits_stride, form.scale, **shape
            )
        else:
            kernels.backward_kernel[grid](
                grad, indices, kept, dlogits, tokens, stride, form.scale,
                SCORES=form.scores, NORMALISED=form.normalised, KBLOCK=next_power_of_2(topk), **shape,
            )  # fmt: skip
    return dlogits, None


_KERNEL = autograd.Kernel(_forward, _backward)
