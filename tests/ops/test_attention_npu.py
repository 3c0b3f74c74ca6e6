"""attention's log-sum-exp, sink and packs on the NPU path, over the emulation of torch_npu."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import attention, packed
from mindspeed_lite.ops.attention.packed import Packing
from mindspeed_lite.ops.dispatch import force
from tests.harness.compare import error, forward_backward
from tests.ops import attention_reference as reference
from tests.ops.attention import NAMES, make

from . import twin

pytestmark = pytest.mark.usefixtures("npu_twin")


@pytest.fixture(params=["its own", "none"])
def argument(request: pytest.FixtureRequest, npu_twin: list[twin.Call], monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the operator has an argument for the sink, as since torch_npu 2.13."""
    backend = importlib.import_module("mindspeed_lite.ops.attention.npu")
    assert backend._takes_sink()
    monkeypatch.setattr(backend, "_takes_sink", lambda: request.param == "its own")
    return str(request.param)


@pytest.mark.parametrize("dv", [8, 5, 12])
@pytest.mark.parametrize("causal", [True, False])
def test_packs_go_to_the_operator_in_one_call(causal: bool, dv: int, npu_twin: list[twin.Call]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(17, *size, generator=generator) for size in ((4, 8), (2, 8), (2, dv), (4, dv)))
    layout = Packing.of([0, 5, 5, 7, 13], starts_q=[0, 6, 6, 8, 16])
    exact = forward_backward(lambda *qkv: reference.packed(*qkv, layout, causal=causal), (q, k, v), dout, torch.float64)
    with force("attention", "npu"):
        got = forward_backward(lambda *qkv: packed.attention(*qkv, layout, causal=causal), (q, k, v), dout)
    (made,) = npu_twin
    assert made.kwargs["input_layout"] == "TND" and made.kwargs["actual_seq_qlen"] == [5, 7, 13]
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert error(ours, truth) < 2e-6, part


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
