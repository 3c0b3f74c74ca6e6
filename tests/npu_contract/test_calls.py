"""Every call of our operators on the real wheel: what reaches the dispatcher is what the contracts ask for."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from mindspeed_lite.ops.dispatch import OPERATORS, operator
from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.definitions import source
from tests.npu_contract.operators import ALL, CASES, CONTRACTS
from tests.npu_contract.operators.attention import Attention
from tests.npu_contract.operators.rms_norm import RmsNorm
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
    for fake, content in zip(*(records[which][name]["forward"] for which in PASSES), strict=True):
        assert same_call(fake, content) == []
        assert {value.device for value in tree_leaves(fake.arguments) if isinstance(value, Tensor)} == {"npu"}


def test_saved_statistics_reach_the_backward_in_the_documented_form(on_npu: Records) -> None:
    """[b, n, s, 8] and [..., 1], in fp32; spelled out here once, beside the contracts that compute it."""
    records = on_npu["cases"]["fake"]
    attention = records["attention/groups"]["backward"][0].arguments
    for name in ("softmax_max", "softmax_sum"):
        assert (attention[name].dtype, attention[name].shape) == ("float32", (2, 4, 24, 8))
    norm = records["rms_norm/3 dimensions"]["backward"][0].arguments
    assert (norm["rstd"].dtype, norm["rstd"].shape) == ("float32", (6, 2, 1))


def test_every_case_has_a_name_of_its_own() -> None:
    assert len(CASES) == len(ALL)


def test_every_operator_with_an_npu_backend_has_cases_and_contracts() -> None:
    with_backend = {name for name in OPERATORS if "npu" in operator(name).backends}
    # Others call PyTorch's own operators, whose kernels torch_npu brings.
    direct = {name for name in with_backend if "torch_npu.npu_" in source(name)} - {"layer_norm"}
    assert direct <= {case.operator for case in CASES.values()} <= with_backend
    assert {op for case in CASES.values() for op in (case.forward, case.backward) if op} <= set(CONTRACTS)
    assert all(name == f"{case.operator}/{case.name}" for name, case in ALL), "a case in another operator's file"


def test_the_cases_are_worth_their_name() -> None:
    """No case passes what torch_npu would assume anyway, and each of a mask's kinds is there."""
    norms = [case for case in CASES.values() if isinstance(case, RmsNorm)]
    attentions = [case for case in CASES.values() if isinstance(case, Attention)]
    assert all(case.eps != 1e-6 for case in norms)
    assert {len(case.shape) for case in norms} == set(range(1, 10))
    assert all(case.arguments()["scale"] != 1.0 for case in attentions)
    hidden = [case.hidden() for case in attentions if case.mask is not None]
    assert all(mask is not None and mask.any() and not mask.all() for mask in hidden)
    for case in attentions:
        if case.causal and case.sq > 1:
            corner = max(case.sk - case.sq, 0)
            assert case.visible()[0, 0, 0].sum() <= corner + 1 + (case.mask is not None) * case.sk, case.name
