"""attention's log-sum-exp, sink and packs on the NPU path, over the emulation of torch_npu."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import attention, packed
from mindspeed_lite.ops.attention.packed import Packing
from mindspeed_lite.ops.dispatch import force
from tests.harness import attention_reference as reference
from tests.harness.attention import CALLS, NAMES, call, make
from tests.harness.attention_reference import backward_half as backward
from tests.harness.attention_reference import forward_half as forward
from tests.harness.compare import error, forward_backward
from tests.npu_contract.operators.attention import Blocks

from . import twin

pytestmark = pytest.mark.usefixtures("npu_twin")


@pytest.mark.parametrize("name", CALLS)
def test_both_halves(name: str) -> None:
    inputs, dout, options = call(name, torch.float32)
    exact = forward_backward(lambda *qkv: reference.attention(*qkv, **options), inputs, dout, torch.float64)
    _, exact_lse = reference.attention(*(t.double() for t in inputs), **options, return_lse=True)
    with force("attention", "npu"):
        out, lse = forward(*inputs, **options)
        grads = backward(dout, *inputs, out, lse, **options)
        asked = attention(*inputs, **options, return_lse=True)
    assert torch.equal(asked[0], out) and torch.equal(asked[1], lse)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    for part, ours, truth in zip(NAMES, (out, *grads), exact, strict=False):
        assert error(ours, truth) < 2e-6, part


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
def test_partial_results_of_two_ranks_make_the_whole(dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(24, 2, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    dout = torch.randn(24, 2, 4, 16, generator=generator).to(dtype)
    # The rank's own rows in causal order, and the first chunk of another rank's keys, which all of them see.
    hidden = torch.cat([torch.zeros(24, 12).bool(), torch.ones(24, 24).bool().triu(1)], 1)

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat([t[:12], t]) for t in (k, v))
        return reference.attention(q, keys, values, mask=hidden)  # type: ignore[return-value]

    exact = forward_backward(whole, (q, k, v), dout, torch.float64)
    with force("attention", "npu"):
        got = forward_backward(lambda *qkv: Blocks.apply(*qkv, None), (q, k, v), dout)
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert ours.dtype == dtype and error(ours, truth) < allowed, part


@pytest.fixture(params=["its own", "none"])
def argument(request: pytest.FixtureRequest, npu_twin: list[twin.Call], monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the operator has an argument for the sink, as since torch_npu 2.13."""
    backend = importlib.import_module("mindspeed_lite.ops.attention.npu")
    assert backend._takes_sink()
    monkeypatch.setattr(backend, "_takes_sink", lambda: request.param == "its own")
    return str(request.param)


@pytest.mark.parametrize("name", CALLS)
def test_sink(name: str, argument: str, npu_twin: list[twin.Call]) -> None:
    inputs, dout, options = call(name, torch.float32)
    inputs = (*inputs, torch.randn(4, generator=torch.Generator().manual_seed(3)))

    def run(function: Any) -> Any:
        return lambda q, k, v, sink: function(q, k, v, sink=sink, **options)

    exact = forward_backward(run(reference.attention), inputs, dout, torch.float64)
    with force("attention", "npu"):
        got = forward_backward(run(attention), inputs, dout)
        calls = [(made.function, "sink" in made.kwargs) for made in npu_twin]
        _, lse = attention(*inputs[:3], sink=inputs[3], return_lse=True, **options)
    *qkv, sink = (t.double() for t in inputs)
    _, exact_lse = reference.attention(*qkv, sink=sink, **options, return_lse=True)
    forward, backward = "npu_fusion_attention", "npu_fusion_attention_grad"
    assert calls == [(forward, True)] if argument == "its own" else [(forward, False), (backward, False)]
    for part, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < 2e-6, part
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dv", [8, 5, 12])
@pytest.mark.parametrize("causal", [True, False])
def test_packs_go_to_the_operator_in_one_call(causal: bool, dv: int, npu_twin: list[twin.Call]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(17, *size, generator=generator) for size in ((4, 8), (2, 8), (2, dv), (4, dv)))
    layout = Packing.of([0, 5, 5, 7, 13], starts_q=[0, 6, 6, 8, 16])
    exact = forward_backward(lambda *qkv: reference.packed(*qkv, layout, causal=causal), (q, k, v), dout, torch.float64)
    with force("attention", "npu"):
        got = forward_backward(lambda *qkv: packed.attention(*qkv, layout, causal=causal), (q, k, v), dout)
        _, lse = packed.attention(q, k, v, layout, causal=causal, return_lse=True)
    (made, _) = npu_twin
    assert made.kwargs["input_layout"] == "TND" and made.kwargs["actual_seq_qlen"] == [5, 7, 13]
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert error(ours, truth) < 2e-6, part
    truth = reference.packed(q.double(), k.double(), v.double(), layout, causal=causal, return_lse=True)[1]
    torch.testing.assert_close(lse.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [dict(window=(2, 0)), dict(sink=True, causal=True)], ids=str)
def test_packs_that_it_does_not_document_go_one_by_one(options: dict[str, Any], npu_twin: list[twin.Call]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(13, n, 8, generator=generator) for n in (4, 2, 2, 4))
    layout = Packing.of([0, 5, 7, 13])
    options = {**options, "sink": torch.randn(4) if "sink" in options else None}
    exact = forward_backward(lambda *qkv: reference.packed(*qkv, layout, **options), (q, k, v), dout, torch.float64)
    with force("attention", "npu"):
        got = forward_backward(lambda *qkv: packed.attention(*qkv, layout, **options), (q, k, v), dout)
    assert {made.kwargs["input_layout"] if "input_layout" in made.kwargs else made.args[5] for made in npu_twin} == {
        "SBH"
    }
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert error(ours, truth) < 2e-6, part


def test_dropout_with_a_sink_is_the_operators_where_it_takes_one(argument: str, npu_twin: list[twin.Call]) -> None:
    (q, k, v), _ = make(12, 12, 1, 2, 2, 8, 8)
    with force("attention", "npu"):
        out = attention(q, k, v, dropout_p=0.5, sink=torch.zeros(2))
    probabilities = [made.kwargs["keep_prob"] for made in npu_twin]
    assert out.shape == q.shape and probabilities == ([0.5] if argument == "its own" else [])
