"""`--bias-dropout-fusion` in real Megatron: the same sums as without it, its own draws, and what is left alone."""

from __future__ import annotations

import torch

import mindspeed_lite
from tests.harness.processes import forked

ON = "use_bias_dropout_fusion"


def layer(training=True, fused=True):
    """What a transformer layer calls, asked for anew at every call."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    return get_bias_dropout_add(training, fused)


def tensors(has_bias, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    x, residual, dy = (torch.randn(7, 2, 48, generator=generator).to(dtype) for _ in range(3))
    bias = torch.randn(48, generator=generator).to(dtype)
    return [x, residual, *([bias] if has_bias else [])], dy


def run(function, given, dy, p=0.0):
    leaves = [each.detach().requires_grad_() for each in given]
    y = function((leaves[0], leaves[2] if len(leaves) > 2 else None), leaves[1], p)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@forked("megatron")
def test_the_warm_up_draws_what_megatron_draws():
    """It hands over a bias of the size of the output, and initial weights are drawn behind it."""
    (x, residual), _ = tensors(False)
    bias = torch.randn(48).bfloat16().expand_as(x)
    torch.compiler.set_stance("force_eager")

    def warm_up():
        torch.manual_seed(5)
        return layer()((x, bias), residual, 0.1), torch.rand(3)

    off = warm_up()
    with mindspeed_lite.enabled(**{ON: True, "strict": True}):
        on = warm_up()
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


@forked("megatron")
def test_dropout_keeps_nothing_and_comes_back_with_the_random_state():
    given, dy = tensors(True)
    saved = []
    inference = layer(training=False)((given[0], given[2]), given[1], 0.0)
    with mindspeed_lite.enabled(**{ON: True, "strict": True}):
        torch.manual_seed(5)
        first = run(layer(), given, dy, 0.3)
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            again = run(layer(), given, dy, 0.3)
        other = run(layer(), given, dy, 0.3)
        # Inference drops nothing, whatever the share, and is Megatron's.
        assert torch.equal(layer(training=False)((given[0], given[2]), given[1], 0.3), inference)
    assert saved == [] and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert 0.2 < (first[1] == 0).float().mean() < 0.4


@forked("megatron")
def test_verification_says_why_dropout_is_not_compared():
    given, dy = tensors(True)
    with mindspeed_lite.enabled(**{ON: True, "strict": True, "verify": 2}):
        run(layer(), given, dy, 0.1)
        report = mindspeed_lite.report()
    assert not report.verifications and any("each draws in its own way" in each for each in report.notices)
