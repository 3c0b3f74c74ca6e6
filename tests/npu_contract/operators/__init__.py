"""One file per operator: its calls, and what is documented of torch_npu's.

Each module may define
    CALLS        name -> a call of our operator in a form that its `cases.py` does not have
    CONTRACTS    operator of torch_npu -> check(call), which yields every documented sentence that the call breaks
    UNFUSED      operators of torch by which one sees in a whole model that ours did not take a call over
Adding an operator is adding a file. Here they are collected; calls as "<module>/<name>". The calls run on the real
wheel (`test_calls.py`) and, for their values, on the emulation (`tests/ops/test_npu.py`), which checks contracts too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

from tests.npu_contract.definitions import OperatorCall
from tests.npu_contract.recorder import Call

MODULES: Mapping[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
}
CALLS: Mapping[str, OperatorCall] = {
    f"{module}/{name}": call for module, content in MODULES.items() for name, call in content.CALLS.items()
}
CONTRACTS: Mapping[str, Callable[[Call], Iterator[str]]] = {
    operator: check for content in MODULES.values() for operator, check in content.CONTRACTS.items()
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
