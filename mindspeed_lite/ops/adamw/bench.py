"""Implementations that adamw is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw as torchs_adamw

from mindspeed_lite.ops.adamw import Rule, adamw, torch_fused
from mindspeed_lite.ops.case import Case, generator

RULE: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
# So near to 1 that gradients which are scaled in place stay what they are over thousands of calls.
SCALE = 1 - 2.0**-20


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Parameters, gradients, both moments, and the copies."""
    count, size = case.shape
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    draws = generator(case)
    params, grads, exp_avgs, exp_avg_sqs = (
        [
            torch.randn(size, generator=draws, device=draws.device).to(case.device, wide).mul_(scale)
            for _ in range(count)
        ]
        for scale in (0.02, 1e-2, 1e-2, 1e-2)
    )
    for exp_avg_sq in exp_avg_sqs:
        exp_avg_sq.square_().add_(1e-6)
    outs = [param.to(case.torch_dtype, copy=True) for param in params]
    return *params, *grads, *exp_avgs, *exp_avg_sqs, *outs


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        *state, outs = _lists(case, tensors)
        adamw(*state, **RULE, step=STEP, grad_scale=SCALE, outs=outs)
        return outs[0]

    return run


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """The steps one after another, by torch's optimizer."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        params, grads, exp_avgs, exp_avg_sqs, outs = _lists(case, tensors)
        for grad in grads:
            grad.mul_(SCALE)
        torchs_adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.tensor(STEP - 1.0) for _ in params],
            amsgrad=False,
            beta1=RULE["betas"][0],
            beta2=RULE["betas"][1],
            lr=RULE["lr"],
            weight_decay=RULE["weight_decay"],
            eps=RULE["eps"],
            maximize=False,
        )
        for param, out in zip(params, outs, strict=True):
            out.copy_(param)
        return outs[0]

    return run


def fused(case: Case) -> Callable[..., torch.Tensor]:
    """The same with torch's fused kernel."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        params, grads, exp_avgs, exp_avg_sqs, outs = _lists(case, tensors)
        torch._foreach_mul_(grads, SCALE)
        torch_fused.adamw(params, grads, exp_avgs, exp_avg_sqs, Rule(**RULE, step=STEP), outs)
        return outs[0]

    return run


def _lists(case: Case, tensors: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
    count = case.shape[0]
    return [list(tensors[start : start + count]) for start in range(0, 5 * count, count)]
