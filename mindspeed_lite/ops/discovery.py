"""Finds the operators: every folder beside this file with a `reference.py`. No list is kept by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from mindspeed_lite.ops.case import Cases

_HERE = Path(__file__).parent

# Operator name -> package that defines OPERATOR, in alphabetical order: no import order decides what a table shows.
OPERATORS: Mapping[str, str] = MappingProxyType(
    {path.parent.name: f"mindspeed_lite.ops.{path.parent.name}" for path in sorted(_HERE.glob("*/reference.py"))}
)


def cases(name: str) -> Cases:
    """The standing cases of an operator, without importing its package, and so without torch.

    Raises:
        ValueError: there is no operator of that name.
    """
    if name not in OPERATORS:
        raise ValueError(f"unknown operator {name!r}; there are {', '.join(OPERATORS)}")
    full = f"{OPERATORS[name]}.cases"
    module = sys.modules.get(full)
    if module is None:
        # An import by name would execute the operator's __init__.py first, which needs torch.
        spec = importlib.util.spec_from_file_location(full, _HERE / name / "cases.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full]
            raise
    found: Cases = module.CASES
    return found
