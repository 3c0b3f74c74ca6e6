"""Every call of our operators on the real wheel: what reaches the dispatcher is what the contracts ask for."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from mindspeed_lite.ops.dispatch import OPERATORS, operator
from tests.npu_contract.checks import problems, same_call
from tests.npu_contract.definitions import source
from tests.npu_contract.operators import CASES, CONTRACTS
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


def test_every_operator_with_an_npu_backend_has_cases_and_contracts() -> None:
    with_backend = {name for name in OPERATORS if "npu" in operator(name).backends}
    # Others call PyTorch's own operators, whose kernels torch_npu brings.
    direct = {name for name in with_backend if "torch_npu.npu_" in source(name)} - {"layer_norm"}
    assert direct <= {case.operator for case in CASES.values()} <= with_backend
    assert {op for case in CASES.values() for op in (case.forward, case.backward) if op} <= set(CONTRACTS)
