"""adamw through the kernel that PyTorch fuses itself, for machines that cannot build a better one.

It makes one pass as well, but wants the copy into low precision as a pass of its own, and divides by a scale and
writes the gradients where it is given one: so the scaled gradients are made here, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    grad_scale: float | torch.Tensor | None = None,
    decoupled: bool = True,
    outs: Sequence[torch.Tensor] | None = None,
) -> None:
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)

    def update(some: slice, gradients: list[torch.Tensor]) -> None:
        fused(
            list(params[some]),
            gradients,
            list(exp_avgs[some]),
            list(exp_avg_sqs[some]),
            [],
            [count] * len(gradients),
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )

    if grad_scale is None and grads[0].dtype == params[0].dtype:
        update(slice(None), list(grads))
    else:
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            g = grad.to(param.dtype)
            update(slice(place, place + 1), [g if grad_scale is None else g * grad_scale])
    if outs is not None:
        torch._foreach_copy_(list(outs), [p.view_as(o) for p, o in zip(params, outs, strict=True)])
