"""What we pass to torch_npu, against an emulation of its documentation (see twin)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.dispatch import backends, force, selected
from mindspeed_lite.ops.rms_norm import reference as rms_norm_reference
from mindspeed_lite.ops.rms_norm import rms_norm
from tests.harness import attention_reference
from tests.harness.compare import error, forward_backward
from tests.harness.reasons import why_not_of

from . import twin
from .twin.attention import UNLIMITED, npu_fusion_attention
from .twin.rms_norm import npu_rms_norm

NAMES = ("out", "dq", "dk", "dv")


pytestmark = pytest.mark.usefixtures("npu_twin")


def test_the_table_shows_it_usable() -> None:
    for op in ("attention", "rms_norm"):
        assert backends(op)["npu"] == []
        assert selected(op, "npu") == ("npu", ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(6, 3, 40), (5, 16), (24,), (2, 1, 1, 1, 1, 1, 1, 1, 8)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    # Weights that 1 + weight represents exactly: the rounding of the sum is the one documented difference.
    w = torch.randint(-8, 8, shape[-1:], generator=generator).to(dtype) / 16

    def run(function: Any, precise: torch.dtype | None) -> list[torch.Tensor]:
        return forward_backward(lambda x, w: function(x, w, 1e-3, zero_centered), (x, w), dy, precise)

    exact = run(rms_norm_reference.rms_norm, torch.float64)
    with force("rms_norm", "npu"):
        got = run(rms_norm, None)
    for name, ours, truth in zip(("y", "dx", "dw"), got, exact, strict=True):
        assert error(ours, truth) <= torch.finfo(dtype).eps + 4e-7, name


def test_rms_norm_refuses_what_the_operator_does_not_take() -> None:
    with force("rms_norm", "npu"):
        reasons = why_not_of(rms_norm)(torch.zeros(2, 8, dtype=torch.float64), torch.ones(8))
        assert len(reasons) == 2 and "float64" in reasons[0] and "one dtype" in reasons[1]


CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "causal, more keys than queries": dict(causal=True, sk=20),
    "causal and one query": dict(causal=True, sq=1),
    "window": dict(window=(3, 0)),
    "window, more keys than queries": dict(window=(3, 0), sk=20),
    "two-sided window": dict(window=(2, 4)),
    "window open to the left": dict(window=(-1, 2)),
    "window open to the right": dict(window=(2, -1)),
    "causal and window": dict(causal=True, window=(4, 9)),
    "mask per batch": dict(mask=(2, 1)),
    "mask for all": dict(mask=(1, 1)),
    "mask per head": dict(mask=(1, 4)),
    "mask and causal": dict(mask=(2, 1), causal=True),
    "mask and window": dict(mask=(2, 4), window=(3, 1)),
    "scale": dict(scale=0.3, causal=True),
    "smaller values": dict(dv=5, causal=True),
    "larger values": dict(dv=13, causal=True),
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, groups: int) -> None:
    options = dict(CASES[name])
    generator = torch.Generator().manual_seed(2)
    sq, d = options.pop("sq", 12), 8
    sk, dv = options.pop("sk", 12), options.pop("dv", d)
    mask = None
    if "mask" in options:
        mask = torch.rand(*options["mask"], sq, sk, generator=generator) > 0.4
        mask[..., 5, :] = True  # a row without keys
    options["mask"] = mask
    q, k, v, dout = (
        torch.randn(shape, generator=generator)
        for shape in ((sq, 2, 4, d), (sk, 2, groups, d), (sk, 2, groups, dv), (sq, 2, 4, dv))
    )

    def run(function: Any, precise: torch.dtype | None) -> list[torch.Tensor]:
        return forward_backward(lambda q, k, v: function(q, k, v, **options), (q, k, v), dout, precise)

    exact = run(attention_reference.attention, torch.float64)
    with force("attention", "npu"):
        got = run(attention, None)
    assert got[0].shape == (sq, 2, 4, dv) and got[0].is_contiguous()
    for part, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < 2e-6, part
    if mask is not None:
        assert not got[0][5].any() and not got[1][5].any()


def test_attention_takes_16_bit_and_packed_inputs() -> None:
    packed = torch.randn(12, 2, 2, 4 * 8).bfloat16()
    q, k, v = packed.split([16, 8, 8], dim=3)
    q = q.reshape(12, 2, 4, 8)
    exact = attention_reference.attention(q.double(), k.double(), v.double(), causal=True)
    with force("attention", "npu"):
        got = attention(q, k, v, causal=True)
    assert got.dtype == torch.bfloat16
    assert error(got, exact) < 2**-8


def test_causal_attention_passes_the_small_triangle_and_shares_it(npu_twin: list[twin.Call]) -> None:
    q = torch.randn(12, 1, 2, 8)
    with force("attention", "npu"):
        attention(q, q, q, causal=True)
        attention(q[-3:], q, q, causal=True)
        attention(q, q, q, window=(3, 0))
        attention(q, q, q, window=(-1, 2))
        attention(q, q, q)
    calls = [call.kwargs for call in npu_twin]
    assert [call.get("sparse_mode", 0) for call in calls] == [2, 3, 4, 4, 0]
    triangles = {id(call["atten_mask"]) for call in calls[:4]}
    assert len(triangles) == 1 and calls[0]["atten_mask"].shape == (2048, 2048)
    assert [(call["pre_tockens"], call["next_tockens"]) for call in calls[2:4]] == [
        (3, 0),
        (UNLIMITED, 2),
    ]
    assert calls[4]["atten_mask"] is None


def test_dropout_keeps_what_the_reference_keeps() -> None:
    """Both draw one number per score from the default generator, so the same seed drops the same scores."""
    q, k, v = (torch.randn(16, 2, 4, 8) for _ in range(3))
    torch.manual_seed(5)
    want = attention_reference.attention(q, k, v, causal=True, dropout_p=0.25)
    torch.manual_seed(5)
    with force("attention", "npu"):
        got = attention(q, k, v, causal=True, dropout_p=0.25)
    assert error(got, want) < 1e-6
    assert error(attention_reference.attention(q, k, v, causal=True), want) > 0.1


def test_attention_refuses_what_the_operator_does_not_take() -> None:
    q = torch.zeros(4, 1, 300, 800, dtype=torch.float64)
    with force("attention", "npu"):
        reasons = why_not_of(attention)(q, q, q, causal=True)
    assert [word in reason for word, reason in zip(("float64", "768", "256"), reasons, strict=True)] == [True] * 3


def test_the_twin_notices_wrong_calls() -> None:
    q = torch.randn(8, 1, 16)
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)

    def call(**changed: Any) -> torch.Tensor:
        arguments = dict(head_num=2, input_layout="SBH", atten_mask=triangle, sparse_mode=2, scale=0.5)
        return npu_fusion_attention(q, q, q, **{**arguments, **changed})[0]

    call()
    for error_type, changed in (
        (TypeError, dict(softmax_scale=0.5)),
        (TypeError, dict(pre_tokens=1)),
        (TypeError, dict(head_num=torch.tensor(2))),
        (ValueError, dict(atten_mask=~triangle)),
        (ValueError, dict(input_layout="BHSD")),
        (ValueError, dict(sparse_mode=1)),
        (ValueError, dict(keep_prob=0.0)),
    ):
        with pytest.raises(error_type):
            call(**changed)
    mask = torch.rand(1, 1, 8, 8) > 0.5
    assert error(call(atten_mask=~mask, sparse_mode=1), call(atten_mask=mask, sparse_mode=1)) > 0.1
    with pytest.raises(TypeError):
        npu_rms_norm(q, torch.ones(16), eps=1e-5)  # type: ignore[call-arg]
    with pytest.raises(ValueError):
        npu_rms_norm(q[0, 0], torch.ones(16))
