"""A CPU emulation of what is documented of some torch_npu operators, for testing our calls of them: a file for each.

Its functions have exactly the documented argument names, order and defaults, and do in plain PyTorch what the
documentation says: layouts, mask polarity, sparse modes, the compressed triangle, token limits. What it forbids raises
(`tests/npu_contract/operators`); what it leaves open comes out as NaN, so that nothing can come to depend on it.
Running our code on this proves the call site against the documentation. It proves nothing about the device: not that
the kernels compute this, nor their precision or speed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from tests.npu_contract import recorder as contract
from tests.npu_contract.operators import violations


class Call(NamedTuple):
    """One call of a function of the twin."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def functions() -> dict[str, Callable[..., Any]]:
    """Every function of this package's files that torch_npu has."""
    found = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        found.update({name: value for name, value in vars(module).items() if name.startswith(("npu_", "_npu_"))})
    return found


def torch_npu(calls: list[Call]) -> types.ModuleType:
    """A module to stand in for torch_npu in sys.modules; every call of it is added to `calls`."""
    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(is_available=lambda: True)  # type: ignore[attr-defined]
    for name, function in functions().items():
        setattr(module, name, _recorded(name, function, calls))
    return module


def _recorded(name: str, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(name, args, kwargs))
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        call = contract.Call(name, tree_map(contract.describe, bound.arguments), tuple(kwargs))
        if found := violations(call):
            raise ValueError("; ".join(found))
        return function(*args, **kwargs)

    return recorded
