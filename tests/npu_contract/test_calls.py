"""Every call of our operators on the real wheel: what reaches the dispatcher is what the contracts ask for."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_lite.ops.dispatch import OPERATORS, operator
from tests.npu_contract.cases import ALL, CASES, Attention, RmsNorm
from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.contracts import CONTRACTS
from tests.npu_contract.recorder import Tensor

Records = dict[str, Any]
PASSES = ("fake", "content")


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", CASES)
def test_the_call_keeps_the_contract(on_npu: Records, name: str, which: str) -> None:
    record = on_npu["cases"][which][name]
    assert problems(CASES[name], record) == []


@pytest.mark.parametrize("name", CASES)
def test_the_call_whose_masks_are_proven_is_the_call_that_is_made(on_npu: Records, name: str) -> None:
    """Masks have a content on CPU tensors only; on NPU tensors everything else must be the same."""
    records = on_npu["cases"]
    fake, content = (records[which][name]["forward"][0] for which in PASSES)
    assert same_call(fake, content) == []
    assert {value.device for value in fake.arguments.values() if isinstance(value, Tensor)} == {"npu"}


def test_saved_statistics_reach_the_backward_in_the_documented_form(on_npu: Records) -> None:
    """[b, n, s, 8] and [..., 1], in fp32; spelled out here once, beside the contracts that compute it."""
    records = on_npu["cases"]["fake"]
    attention = records["groups"]["backward"][0].arguments
    for name in ("softmax_max", "softmax_sum"):
        assert (attention[name].dtype, attention[name].shape) == ("float32", (2, 4, 24, 8))
    norm = records["3 dimensions"]["backward"][0].arguments
    assert (norm["rstd"].dtype, norm["rstd"].shape) == ("float32", (6, 2, 1))


def test_every_operator_with_an_npu_backend_has_cases_and_contracts() -> None:
    with_backend = {name for name in OPERATORS if "npu" in operator(name).backends}
    assert {case.operator for case in CASES.values()} == with_backend
    assert {op for case in CASES.values() for op in (case.forward, case.backward)} <= set(CONTRACTS)


def test_the_cases_are_worth_their_name() -> None:
    """No case passes what torch_npu would assume anyway, and each of a mask's kinds is there."""
    norms = [case for case in CASES.values() if isinstance(case, RmsNorm)]
    attentions = [case for case in CASES.values() if isinstance(case, Attention)]
    assert all(case.eps != 1e-6 for case in norms)
    assert {len(case.shape) for case in norms} == set(range(1, 10))
    assert all(case.arguments()["scale"] != 1.0 for case in attentions)
    assert len(CASES) == len(ALL), "two cases have one name"
    hidden = [case.hidden() for case in attentions if case.mask is not None]
    assert all(mask is not None and mask.any() and not mask.all() for mask in hidden)
    for case in attentions:
        if case.causal and case.sq > 1:
            corner = case.sk - case.sq
            assert case.visible()[0, 0, 0].sum() <= corner + 1 + (case.mask is not None) * case.sk, case.name
