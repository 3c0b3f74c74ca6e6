"""One file per operator: its calls, what is documented of them, and how they can go wrong.

Each module may define
    CASES        the calls of our operator that are proven on the real wheel
    CONTRACTS    operator of torch_npu -> check(call), which yields every documented sentence that the call breaks
    MUTATIONS    name -> the call site in ops/<module>/npu.py broken on purpose
    UNFUSED      operators of torch by which one sees in a whole model that ours did not take a call over
Adding an operator is adding a file. Here they are collected; cases and mutations as "<module>/<name>".
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from tests.npu_contract.definitions import ContractCase, Mutation
from tests.npu_contract.recorder import Call

MODULES: Mapping[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
}


def _named(attribute: str) -> dict[str, Any]:
    return {
        f"{module}/{name}": value
        for module, content in MODULES.items()
        for name, value in getattr(content, attribute, {}).items()
    }


CASES: Mapping[str, ContractCase] = {
    f"{module}/{case.name}": case for module, content in MODULES.items() for case in getattr(content, "CASES", ())
}
MUTATIONS: Mapping[str, Mutation] = _named("MUTATIONS")
CONTRACTS: Mapping[str, Callable[[Call], Iterator[str]]] = {
    operator: check for content in MODULES.values() for operator, check in getattr(content, "CONTRACTS", {}).items()
}
UNFUSED: Mapping[str, tuple[str, ...]] = {
    module: content.UNFUSED for module, content in MODULES.items() if hasattr(content, "UNFUSED")
}
# What torch_npu does for `Tensor.type_as` and its like: no operator of ours, and nothing to get wrong.
CASTS = ("_npu_dtype_cast", "_npu_dtype_cast_backward")


def violations(call: Call) -> list[str]:
    """Every sentence of the operator's contract that `call` breaks; to have no contract is a violation too."""
    if call.operator in CASTS:
        return []
    contract = CONTRACTS.get(call.operator)
    if contract is None:
        return [f"{call.operator} has no contract: write one in tests/npu_contract/operators"]
    return [f"{call.operator}: {violation}" for violation in contract(call)]
