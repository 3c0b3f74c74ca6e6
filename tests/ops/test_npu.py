"""What we pass to torch_npu, against an emulation of its documentation (see twin)."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.dispatch import REFERENCE, force
from tests.harness.compare import error
from tests.harness.reasons import why_not_of
from tests.npu_contract.definitions import Make
from tests.npu_contract.operators import CALLS
from tests.ops import attention_reference

from . import twin
from .twin.attention import UNLIMITED

pytestmark = pytest.mark.usefixtures("npu_twin")


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


@pytest.mark.parametrize("name", [name for name in CALLS if "dropout" not in name])
def test_calls_of_the_contract_have_the_values_of_the_reference(npu_twin: list[twin.Call], name: str) -> None:
    """Masks, scales, layouts and padding mean what the operator documents."""
    found = []
    for backend in ("npu", REFERENCE):
        with force(name.partition("/")[0], backend):
            make = Make("cpu", draws=True)
            outputs = [each for each in tree_leaves(CALLS[name](make)) if isinstance(each, torch.Tensor)]
            wanted = [each for each in outputs if each.requires_grad]
            if make.leaves:
                outputs += torch.autograd.grad(wanted, make.leaves, [each.detach().cos() for each in wanted])
            found.append([each.detach() for each in outputs])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        finite = theirs.isfinite()
        if ours.dtype.is_floating_point:
            assert torch.equal(ours[~finite], theirs[~finite])
            assert error(ours[finite], theirs[finite]) <= max(8 * make.eps, 2**-12)
        else:
            assert torch.equal(ours, theirs)
