"""adamw on Ascend NPUs through torch_npu's kernel for `_fused_adamw_`, tensor by tensor.

It runs on aclnnApplyAdamWV2, `npu_apply_adam_w` on the older aclop interface. torch_npu ignores `grad_scale` and
`found_inf`, and computes `_fused_adam_` (L2) on the host: gradients are scaled here and the reference serves L2. The
step count must be a device tensor.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401  (brings the kernel)

from mindspeed_lite.ops.adamw import Case
from mindspeed_lite.ops.adamw.pieces import Lists, Rule, piecewise

DTYPES = (torch.float32,)


def supported(case: Case) -> list[str]:
    reasons = []
    if not case.decoupled:
        reasons.append("L2 regularisation: torch_npu computes _fused_adam_ on the host")
    if not case.contiguous:
        reasons.append("a tensor is not contiguous")
    return reasons


@piecewise
def adamw(lists: Lists, rule: Rule) -> None:
    count = torch.full((), float(rule.step), dtype=torch.float32, device=lists.params[0].device)
    for param, grad, exp_avg, exp_avg_sq in zip(*lists[:4], strict=True):
        if not param.numel():
            continue
        g = grad.to(param.dtype)
        torch._fused_adamw_(
            [param],
            [g if rule.grad_scale is None else g * rule.grad_scale],
            [exp_avg],
            [exp_avg_sq],
            [],
            [count],
            lr=rule.lr,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )
    if lists.outs is not None:
        torch._foreach_copy_(list(lists.outs), [p.view_as(o) for p, o in zip(lists.params, lists.outs, strict=True)])
