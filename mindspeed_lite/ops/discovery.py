"""Finds the operators: folders with a `cases.py`. Imports torch only with cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_lite.ops.case import OperatorCases

# Operator name -> package that defines OPERATOR, sorted.
OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        path.parent.name: f"mindspeed_lite.ops.{path.parent.name}"
        for path in sorted(Path(__file__).parent.glob("*/cases.py"))
    }
)


def package(name: str) -> str:
    """The package of an operator; raises ValueError for an unknown name."""
    if name not in OPERATORS:
        raise ValueError(f"unknown operator {name!r}; there are {', '.join(OPERATORS)}")
    return OPERATORS[name]


def cases(name: str) -> OperatorCases:
    found: OperatorCases = importlib.import_module(f"{package(name)}.cases").CASES
    return found
