"""attention's log-sum-exp, its two halves, and the sink: everything that one softmax over several parts needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.attention.autograd import sink_gradient, with_sink
from tests.harness.compare import error, forward_backward
from tests.ops import attention_reference as reference
from tests.ops.attention import NAMES, make
from tests.ops.attention_reference import backward_half as backward
from tests.ops.attention_reference import forward_half as forward


def test_numbers_by_hand() -> None:
    """Two keys with scores ln 1 and ln 3 and values 0 and 4: weights 1/4 and 3/4."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, math.log(3)]).reshape(2, 1, 1, 1)
    v = torch.tensor([0.0, 4.0]).reshape(2, 1, 1, 1)
    for function in (attention, reference.attention):
        assert function(q, k, v, scale=1.0).item() == pytest.approx(3.0)
        # A sink of ln 4 takes half of the weight.
        assert function(q, k, v, scale=1.0, sink=torch.tensor([math.log(4)])).item() == pytest.approx(1.5)
    out, lse = forward(q, k, v, scale=1.0)
    assert out.item() == pytest.approx(3.0) and lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
def test_parts_of_the_keys_put_together(sink: bool) -> None:
    """As context parallelism does: causal over the own part, all of an earlier one, none of some rows."""
    (q, k, v), dout = make(10, 30, 2, 4, 2, 8, 8)
    offset = torch.randn(4, generator=torch.Generator().manual_seed(1)) if sink else None
    hidden = torch.zeros(10, 10, dtype=torch.bool)
    hidden[:4] = True
    whole = torch.cat([torch.zeros(10, 10, dtype=torch.bool), hidden, torch.ones(10, 10).triu(1).bool()], 1)
    parts = [
        (k[i : i + 10], v[i : i + 10], how) for i, how in ((0, {}), (10, dict(mask=hidden)), (20, dict(causal=True)))
    ]
    results = [forward(q, keys, values, **how) for keys, values, how in parts]
    lse = torch.stack([each for _, each in results]).logsumexp(0)
    out = sum(part * (each - lse).exp().permute(2, 0, 1).unsqueeze(-1) for part, each in results)
    inputs = (q, k, v)
    if offset is not None:
        out, lse = with_sink(out, lse, offset)
        inputs = (q, k, v, offset)
    grads = [backward(dout, q, keys, values, out, lse, **how) for keys, values, how in parts]
    got = [out, sum(dq for dq, _, _ in grads), *(torch.cat([each[i] for each in grads]) for i in (1, 2))]
    if offset is not None:
        got.append(sink_gradient(dout, out, lse, offset))

    def whole_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sink: torch.Tensor) -> Any:
        return reference.attention(q, k, v, mask=whole, sink=sink[0] if sink else None)

    exact = forward_backward(whole_attention, inputs, dout, torch.float64)
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert error(ours, truth) < 2e-6, part


@pytest.mark.parametrize("value", [-1e4, 1e4])
def test_extreme_sinks(value: float) -> None:
    inputs, dout = make(6, 6, 1, 2, 2, 4, 4)
    got = forward_backward(
        lambda *all_: attention(*all_[:3], sink=all_[3], causal=True), (*inputs, torch.full((2,), value)), dout
    )
    assert all(part.isfinite().all() for part in got)
    plain = forward_backward(lambda *qkv: attention(*qkv, causal=True), inputs, dout)
    for ours, without in zip(got, plain, strict=False):
        assert torch.equal(ours, torch.zeros_like(ours) if value > 0 else without)
