"""adamw through PyTorch's fused kernel, for machines that cannot compile ours.

Given a scale it divides by it and overwrites gradients, so they are scaled here, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed_lite.ops.adamw.pieces import Rule, piecewise


@piecewise
def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rule: Rule,
    outs: Sequence[torch.Tensor] | None = None,
) -> None:
    fused = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    count = torch.full((), float(rule.step), dtype=torch.float32, device=params[0].device)

    def update(some: slice, gradients: list[torch.Tensor]) -> None:
        fused(
            list(params[some]),
            gradients,
            list(exp_avgs[some]),
            list(exp_avg_sqs[some]),
            [],
            [count] * len(gradients),
            lr=rule.lr,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )

    if rule.grad_scale is None and grads[0].dtype == params[0].dtype:
        update(slice(None), list(grads))
    else:
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            g = grad.to(param.dtype)
            update(slice(place, place + 1), [g if rule.grad_scale is None else g * rule.grad_scale])
    if outs is not None:
        torch._foreach_copy_(list(outs), [p.view_as(o) for p, o in zip(params, outs, strict=True)])
