"""moe_router on CPU: one pass of C++ per direction.

Scores and choice have PyTorch's bits: see cpu.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import autograd, native, traced
from mindspeed_lite.ops.moe_router import Case, reference
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Form
from mindspeed_lite.ops.rows import as_rows

LIBRARY = native.Library(__file__)
DTYPES = native.DTYPES

_WORK = 8  # cost of a score in elements of a memory pass
_AS_THEY_ARE = 2
_KINDS = {SOFTMAX: 1, PRE_SOFTMAX: _AS_THEY_ARE, SIGMOID: 3, SQRTSOFTPLUS: 4}  # `Kind` in cpu.cpp


def supported(case: Case) -> list[str]:
    reasons = []
    if case.form.groups is not None and case.form.groups.best > 2:
        reasons.append(
            f"groups judged by their {case.form.groups.best} best experts: the kernel takes one or two, "
            f"whose sum does not depend on its order"
        )
    return reasons


def moe_router(logits: Tensor, expert_bias: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    probs, chosen = autograd.apply(_KERNEL, (logits, expert_bias), (form, logits.shape[1]))
    return probs, chosen


def _forward(inputs: Any, options: tuple[Form, int]) -> tuple[tuple[Tensor, ...], autograd.Inputs]:
    (logits, expert_bias), (form, experts) = inputs, options
    tokens, topk, dtype = logits.shape[0], form.topk, logits.dtype
    scores = logits if form.scores == SOFTMAX else reference.scores_of(logits, form.scores)
    bias = None if expert_bias is None else expert_bias.to(torch.float32).contiguous()
    probs = torch.empty(tokens, experts, dtype=dtype)
    chosen = torch.empty(tokens, experts, dtype=torch.bool)
    indices = torch.empty(tokens, topk, dtype=torch.int64)
    kept = None if form.scores == PRE_SOFTMAX else torch.empty(tokens, topk, dtype=torch.float32)
    kind = _KINDS[form.scores]
    if kind >= _KINDS[SIGMOID] and not form.normalised:
        kind = _AS_THEY_ARE
    rows, stride = as_rows(scores)
    LIBRARY.kernel("forward", scores.dtype, dtype)(
        kind, rows, stride, bias, probs, chosen, indices, kept, tokens, experts, topk, *(form.groups or (0, 0, 0)),
        form.scale, native.threads(_WORK * scores.numel()),
    )  # fmt: skip
    if traced.dry:
        # A dry run knows from it how many are chosen.
        chosen = chosen.scatter(1, indices, True)
    return (probs, chosen), (indices, logits if kept is None else kept)


def _backward(dprobs: Tensor, saved: Any, options: tuple[Form, int], wanted: Sequence[bool]) -> autograd.Inputs:
    (indices, kept), (form, experts) = saved, options
    tokens, topk = indices.shape
    grad, stride = as_rows(dprobs)
    dlogits = torch.empty(tokens, experts, dtype=dprobs.dtype)
    threads = native.threads(_WORK * dlogits.numel())
    if form.scores == PRE_SOFTMAX:
        logits, logits_stride = as_rows(kept)
        LIBRARY.kernel("backward_all", dprobs.dtype)(
            logits, logits_stride, grad, stride, indices, dlogits,
            tokens, experts, topk, form.scale, threads,
        )  # fmt: skip
    else:
        LIBRARY.kernel("backward", dprobs.dtype)(
            _KINDS[form.scores], grad, stride, indices, kept, dlogits,
            tokens, experts, topk, form.normalised, form.scale, threads,
        )  # fmt: skip
    return dlogits, None


_KERNEL = autograd.Kernel(_forward, _backward)
