"""attention's log-sum-exp, its two halves, and the sink: everything that one softmax over several parts needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.ops.attention import attention, blocked
from mindspeed_lite.ops.attention.autograd import sink_gradient, with_sink
from tests.harness import attention_reference as reference
from tests.harness.attention import CALLS, NAMES, call, make, slack
from tests.harness.attention_reference import backward_half as backward
from tests.harness.attention_reference import forward_half as forward
from tests.harness.compare import assert_not_worse, error, forward_backward, one_thread


def test_numbers_by_hand() -> None:
    """Two keys with scores ln 1 and ln 3 and values 0 and 4: weights 1/4 and 3/4."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, math.log(3)]).reshape(2, 1, 1, 1)
    v = torch.tensor([0.0, 4.0]).reshape(2, 1, 1, 1)
    for function in (attention, reference.attention):
        out, lse = function(q, k, v, scale=1.0, return_lse=True)
        assert out.item() == pytest.approx(3.0) and lse.item() == pytest.approx(math.log(4))
        # A sink of ln 4 takes half of the weight.
        sink = torch.tensor([math.log(4)])
        out, lse = function(q, k, v, scale=1.0, sink=sink, return_lse=True)
        assert out.item() == pytest.approx(1.5) and lse.item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("small_blocks", [None, 100], ids=["kernel", "blocked"])
@pytest.mark.parametrize("name", CALLS)
def test_both_halves_are_the_whole(name: str, small_blocks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, dout, options = call(name, torch.float32)
    if small_blocks:
        from mindspeed_lite.ops.attention import cpu

        monkeypatch.setattr(blocked, "_SCORES", small_blocks)
        monkeypatch.setattr(blocked, "_BAND_ROWS", 5)
        monkeypatch.setattr(cpu, "forward", blocked.forward)
        monkeypatch.setattr(cpu, "backward", blocked.backward)
    wide = [t.double() for t in inputs]
    exact = forward_backward(lambda *qkv: reference.attention(*qkv, **options), inputs, dout, torch.float64)
    _, exact_lse = reference.attention(*wide, **options, return_lse=True)
    out, lse = forward(*inputs, **options)
    assert lse.dtype == torch.float32 and out.is_contiguous()
    assert torch.equal(lse.isinf(), exact_lse.isinf()) and not lse.isposinf().any()
    seen = ~lse.isinf()
    assert (lse - exact_lse)[seen].abs().max() < 2e-6
    assert not out.permute(1, 2, 0, 3)[~seen].any()
    for part, ours, truth in zip(NAMES, (out, *backward(dout, *inputs, out, lse, **options)), exact, strict=False):
        assert ours.dtype == torch.float32 and error(ours, truth) < 2e-6, part
    definition = reference.backward(dout.double(), *wide, exact[0], exact_lse, **options)
    for ours, truth in zip(definition, exact[1:], strict=True):
        assert error(ours, truth) < 1e-12


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


def megatron_with_offset(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Megatron's local path with its SoftmaxOne, in the input's dtype throughout."""
    (sq, b, n, d), (sk, _, g, dv) = q.shape, v.shape
    k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    scores = torch.baddbmm(
        torch.empty(b * n, sq, sk, dtype=q.dtype),
        q.reshape(sq, b * n, d).transpose(0, 1),
        k.reshape(sk, b * n, d).permute(1, 2, 0),
        beta=0.0,
        alpha=d**-0.5,
    ).view(b, n, sq, sk)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0)
    scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(b, -1, sq, -1)], -1)
    probs = scores.softmax(-1)[..., :-1].reshape(b * n, sq, sk)
    context = torch.bmm(probs, v.reshape(sk, b * n, dv).transpose(0, 1))
    return context.view(b, n, sq, dv).permute(2, 0, 1, 3).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("groups", [4, 1])
def test_error_with_a_sink_is_not_above_that_of_megatron(dtype: torch.dtype, groups: int) -> None:
    inputs, dout = make(130, 130, 2, 4, groups, 32, 32, dtype=dtype)
    sink = torch.randn(4, generator=torch.Generator().manual_seed(2)).to(dtype)
    hidden = torch.ones(130, 130).triu(1).bool()
    exact = forward_backward(
        lambda q, k, v, s: reference.attention(q, k, v, causal=True, sink=s), (*inputs, sink), dout, torch.float64
    )
    replaced = forward_backward(lambda q, k, v, s: megatron_with_offset(q, k, v, s, hidden), (*inputs, sink), dout)
    got = forward_backward(lambda q, k, v, s: attention(q, k, v, causal=True, sink=s), (*inputs, sink), dout)
    # The output is rounded once more, after the kernel; its rounding reaches the gradients through dout . out.
    free = slack(*inputs[:2], hidden, 32**-0.5) + torch.finfo(dtype).eps / 2
    assert_not_worse(got, replaced, exact, free, NAMES)


@settings(max_examples=40)
@given(st.data())
def test_any_call_with_a_sink_agrees_with_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    sq, sk, b, g, ratio = (draw(st.integers(1, high)) for high in (24, 24, 2, 2, 3))
    d, dv = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    options: dict[str, Any] = dict(causal=draw(st.booleans()))
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(-1, 8)), draw(st.integers(-1, 8)))
    if draw(st.booleans()):
        options["mask"] = torch.rand(sq, sk) > draw(st.sampled_from([0.1, 0.5, 0.9]))
    inputs, dout = make(sq, sk, b, g * ratio, g, d, dv, torch.float64, draw(st.integers(0, 99)))
    sink = torch.randn(g * ratio, dtype=torch.float64) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    with one_thread():
        exact, got = (
            forward_backward(lambda q, k, v, s, f=f: f(q, k, v, sink=s, **options), (*inputs, sink), dout)
            for f in (reference.attention, attention)
        )
        lse = attention(*inputs, sink=sink, return_lse=True, **options)[1]
        exact_lse = reference.attention(*inputs, sink=sink, return_lse=True, **options)[1]
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("function", [attention, reference.attention], ids=["ours", "reference"])
def test_gradcheck_with_a_sink(function: Any) -> None:
    inputs, _ = make(4, 5, 2, 4, 2, 3, 2, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[1] = True
    leaves = tuple(t.requires_grad_() for t in (*inputs, torch.randn(4, dtype=torch.float64)))
    with one_thread():
        assert gradcheck(lambda q, k, v, s: function(q, k, v, sink=s, mask=mask), leaves)


def test_the_log_sum_exp_has_no_gradient_and_keeps_that_of_the_output() -> None:
    inputs, dout = make(6, 6, 1, 2, 2, 4, 4)
    want = forward_backward(lambda *qkv: attention(*qkv, causal=True), inputs, dout)
    leaves = [t.clone().requires_grad_() for t in inputs]
    out, lse = attention(*leaves, causal=True, return_lse=True)
    assert not lse.requires_grad and lse.shape == (1, 2, 6)
    out.backward(dout)
    for leaf, grad in zip(leaves, want[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, grad)
    with torch.no_grad():
        assert not attention(*leaves, return_lse=True)[0].requires_grad


def test_only_the_sinks_gradient() -> None:
    inputs, dout = make(6, 6, 1, 2, 2, 4, 4)
    sink = torch.zeros(2)
    want = forward_backward(lambda *all_: attention(*all_[:3], sink=all_[3]), (*inputs, sink), dout)[4]
    sink.requires_grad_()
    attention(*inputs, sink=sink).backward(dout)
    assert sink.grad is not None and torch.equal(sink.grad, want)


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
