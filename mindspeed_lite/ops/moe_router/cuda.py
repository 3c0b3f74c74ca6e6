"""moe_router on CUDA: torch.topk for the choice, one Triton kernel per direction for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from mindspeed_lite.ops.moe_router import autograd, kernels, reference
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, SOFTMAX, Form
from mindspeed_lite.ops.row_kernels import WIDEST, launch, on
from mindspeed_lite.ops.rows import as_rows

if TYPE_CHECKING:
    from mindspeed_lite.ops.moe_router import Case

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in _DTYPES:
        reasons.append(f"dtype {case.dtype}: the kernels compute in fp32")
    if case.experts > WIDEST:
        reasons.append(f"{case.experts} experts: a program holds {WIDEST} numbers of a row")
    return reasons


def moe_router(function: str, logits: torch.Tensor, *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        # torch.compile fuses the reference.
        return reference.moe_router(function, logits, *arguments)
    if function == "topk_routing":
        return autograd.route(_PASS, logits, *arguments)
    return autograd.aux_scores(_AUX, logits, *arguments)


def _forward(logits: torch.Tensor, expert_bias: torch.Tensor | None, form: Form) -> autograd.Routed:
    (tokens, experts), topk = logits.shape, form.topk
    logits = logits.detach()
    scores = logits if form.scores == SOFTMAX else reference.scores_of(logits, form.scores)
    by = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    indices = reference.choose(by, form)[1].contiguous()
    probs = logits.new_empty(tokens, topk if form.dense else experts)
    chosen = None if form.dense else logits.new_empty((tokens, experts), dtype=torch.bool)
    kept = None if form.scores == PRE_SOFTMAX else logits.new_empty((tokens, topk), dtype=torch.float32)
    rows, stride = as_rows(scores)
    if tokens:
        tile = launch(experts)
        with on(logits):
            kernels.forward_kernel[(triton.cdiv(tokens, tile.rows),)](
                rows, indices, probs, chosen, kept, tokens, stride, form.scale,
                SCORES=form.scores, NORMALISED=form.normalised, KEEPS=kept is not None, DENSE=form.dense,
                EXPERTS=experts, TOPK=topk, KBLOCK=triton.next_power_of_2(topk), ROWS=tile.rows, BLOCK=tile.block,
                num_warps=tile.warps,
            )  # fmt: skip
    return autograd.Routed(probs, indices if chosen is None else chosen, indices, kept)


def _backward(
    dprobs: torch.Tensor, indices: torch.Tensor, kept: torch.Tensor, form: Form, experts: int
) -> torch.Tensor:
    tokens, topk = indices.shape
    grad, stride = as_rows(dprobs)
    dlogits = dprobs.new_empty(tokens, experts)
    if tokens == 0:
        return dlogits
    tile = launch(experts)
    grid = (triton.cdiv(tokens, tile.rows),)
    shape = {"EXPERTS": experts, "TOPK": topk, "KBLOCK": triton.next_power_of_2(topk), "ROWS": tile.rows}
    shape |= {"BLOCK": tile.block, "DENSE": form.dense, "num_warps": tile.warps}
    with on(dprobs):
        if form.scores == PRE_SOFTMAX:
            logits, logits_stride = as_rows(kept)
            kernels.backward_all_kernel[grid](
                grad, indices, logits, dlogits, tokens, stride, logits_stride, form.scale, **shape
            )
        else:
            kernels.backward_kernel[grid](
                grad, indices, kept, dlogits, tokens, stride, form.scale,
                SCORES=form.scores, NORMALISED=form.normalised, **shape,
            )  # fmt: skip
    return dlogits


def _aux_forward(
    logits: torch.Tensor, topk: int, function: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    scores, sums = reference.normalised_scores(logits.detach(), function)
    return reference.routing_map(scores, torch.topk(scores, topk, dim=1).indices), scores, sums


def _aux_backward(
    dscores: torch.Tensor, scores: torch.Tensor, sums: torch.Tensor | None, function: str, dtype: torch.dtype
) -> torch.Tensor:
    tokens, experts = scores.shape
    grad, stride = as_rows(dscores)
    dlogits = scores.new_empty((tokens, experts), dtype=dtype)
    if tokens:
        tile = launch(experts)
        with on(scores):
            kernels.backward_scores_kernel[(triton.cdiv(tokens, tile.rows),)](
                grad, scores, sums, dlogits, tokens, stride,
                SCORES=function, EXPERTS=experts, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.warps,
            )  # fmt: skip
    return dlogits


_PASS = autograd.Pass(_forward, _backward)
_AUX = autograd.AuxPass(_aux_forward, _aux_backward)
