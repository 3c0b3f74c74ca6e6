"""Reference adamw in plain PyTorch."""

from __future__ import annotations

from mindspeed_lite.ops.adamw.pieces import Lists, Rule, piecewise


@piecewise
def adamw(lists: Lists, rule: Rule) -> None:
    """AdamW as in `torch.optim.AdamW`, tensor by tensor, or Adam with L2 regularisation."""
    beta1, beta2 = rule.betas
    rate = rule.lr / (1 - beta1**rule.step)
    root = (1 - beta2**rule.step) ** 0.5
    for place, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(*lists[:4], strict=True)):
        g = grad.to(param.dtype).view_as(param)
        if rule.grad_scale is not None:
            g = g * rule.grad_scale
        if rule.decoupled:
            param.mul_(1 - rule.lr * rule.weight_decay)
        else:
            g = g.add(param, alpha=rule.weight_decay)
        exp_avg.lerp_(g.view_as(exp_avg), 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(g.view_as(exp_avg_sq), g.view_as(exp_avg_sq), value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / root).add_(rule.eps)
        param.addcdiv_(exp_avg.view_as(param), denominator.view_as(param), value=-rate)
        if lists.outs is not None:
            lists.outs[place].copy_(param.view_as(lists.outs[place]))
