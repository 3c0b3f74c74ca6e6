"""Every call of our operators on the real wheel: what reaches the dispatcher is what the contracts ask for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_lite.ops import dispatch
from tests.npu_contract.definitions import Make
from tests.npu_contract.operators import CALLS, CONTRACTS, MODULES, violations
from tests.npu_contract.recorder import describe
from tests.npu_contract.runner import declared

DECLARED = [f"{case.operator}: {case.name}" for case in declared("cpu")]


def problems(name: str, record: dict[str, Any]) -> list[str]:
    """The error if there was one, every documented sentence that a call breaks, and results of another form."""
    found = [record["error"]] if record["error"] else []
    found += [violation for call in record["calls"] for violation in violations(call)]
    operator, is_call, _ = name.partition("/")
    if record["error"]:
        return found
    if is_call:
        with dispatch.force(operator, dispatch.REFERENCE):
            wanted = tree_leaves(tree_map(describe, CALLS[name](Make("cpu"))))
        found += _differences("the output", tree_leaves(record["out"]), wanted)
        if not any(call.operator in MODULES[operator].CONTRACTS for call in record["calls"]):
            found.append(f"it called {[call.operator for call in record['calls']]}")
    return found + _differences("a gradient", record.get("gradients", []), record["leaves"])


def _differences(what: str, have: list[Any], want: list[Any]) -> list[str]:
    mine, theirs = ([str(each) for each in some] for some in (have, want))
    return [] if mine == theirs else [f"{what} is {mine}: want {theirs}"]


@pytest.mark.parametrize("which", ["fake", "host"])
@pytest.mark.parametrize("name", [*CALLS, *DECLARED])
def test_the_call_keeps_the_contract(records: dict[str, dict[str, Any]], name: str, which: str) -> None:
    """On fake tensors, and through the wheel's own C++ checks."""
    assert problems(name, records[which][name]) == []


def test_every_operator_with_an_npu_backend_has_calls_and_contracts(records: dict[str, dict[str, Any]]) -> None:
    with_backend = {name for name in dispatch.OPERATORS if "npu" in dispatch.operator(name).backends}
    # Others call PyTorch's own operators, whose kernels torch_npu brings.
    specs = {name: importlib.util.find_spec(dispatch.operator(name).backends["npu"]) for name in with_backend}
    direct = {name for name, spec in specs.items() if "torch_npu.npu_" in Path(str(spec and spec.origin)).read_text()}
    assert direct - {"layer_norm"} <= {name.partition("/")[0] for name in CALLS} <= with_backend
    assert {call.operator for record in records["fake"].values() for call in record["calls"]} >= set(CONTRACTS)


@pytest.mark.parametrize("operator", MODULES)
def test_its_cases_reach_an_operator_of_torch_npus(records: dict[str, dict[str, Any]], operator: str) -> None:
    found = [records["fake"][each]["calls"] for each in DECLARED if each.startswith(f"{operator}: ")]
    assert any(found)
