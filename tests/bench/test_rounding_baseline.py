"""The rounding baselines change rounding and nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder, SampleRandomInDtype


def trained(mode=None, dtype=torch.float32):
    torch.manual_seed(3)
    x = torch.randn(64, 300, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 7, bias=False)).double()
    torch.manual_seed(4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model, x = model.to(dtype), x.to(dtype)
    batched = x.view(4, 16, 300)
    with mode or nullcontext():
        loss = model(x).square().mean() + torch.bmm(batched, batched.mT).mean()
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_other_order_rounds_differently_forward_and_backward_and_is_as_right():
    exact = trained(dtype=torch.float64)
    plain, other = trained(), trained(ReversedReductionOrder())
    again = trained()
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert not torch.equal(plain[1], other[1]), "gradients must round differently"
    for a, b, e in zip(plain, other, exact, strict=True):
        error = (b.double() - e).norm() / e.norm()
        assert error < 4 * max((a.double() - e).norm() / e.norm(), torch.tensor(6e-8))


def test_float32_begins_from_the_weights_of_the_other_precision():
    def drawn(dtype, mode=None):
        torch.manual_seed(5)
        parameter = torch.empty(300, dtype=dtype)
        with mode or nullcontext():
            torch.nn.init.normal_(parameter, 0.0, 0.02)
        return parameter, torch.rand(3)

    narrow, after_narrow = drawn(torch.bfloat16)
    plain, _ = drawn(torch.float32)
    wide, after_wide = drawn(torch.float32, SampleRandomInDtype(torch.bfloat16))
    assert wide.dtype == torch.float32
    assert torch.equal(wide, narrow.float()) and not torch.equal(wide, plain)
    assert torch.equal(after_narrow, after_wide), "the stream goes on alike"
