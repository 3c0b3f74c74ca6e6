"""Arguments as the real package has them, by `signatures.json`, which `tests.te_contract.signatures` writes."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORD: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("signatures.json").read_text())


def signature_of(text: str, names: dict[str, Any]) -> inspect.Signature:
    """The signature that a record has as text; `names` are those of its defaults."""
    return inspect.signature(eval(f"lambda {text}: None", {**names, "required": inspect.Parameter.empty}))


def recorded(function: Callable[..., Any]) -> Any:
    """Make `function(given)`, or the method `function(self, given)`, take the recorded arguments."""
    signature = signature_of(RECORD[function.__module__][function.__qualname__], function.__globals__)
    is_method = "." in function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*args[:is_method], SimpleNamespace(**bound.arguments))

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def keep(module: Any, given: Any, names: str) -> None:
    """Set attributes to the arguments of the same names."""
    for name in names.split():
        setattr(module, name, getattr(given, name))
