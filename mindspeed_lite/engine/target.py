"""Resolves "package.mod:Class.attr" to its owner and raw attribute."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import TargetError

Owner = Any  # a module or a class
Place = tuple[Owner, str]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SYNTAX = re.compile(rf"({_NAME}):({_NAME})")


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise TargetError(f"`{text}` is not a target; write `package.module:Class.attribute`.")
    return found[1], tuple(found[2].split("."))


def top_level(text: str) -> str:
    return re.split(r"[.:]", text, maxsplit=1)[0]


@dataclass(frozen=True, eq=False)
class Target:
    """An attribute: `owner` defines `name`; `raw`: unbound, from the owner's dictionary."""

    text: str
    owner: Owner
    name: str
    raw: Any

    @property
    def is_foreign(self) -> bool:
        """Whether another package defines it."""
        return top_level(str(getattr(unwrap(self.raw), "__module__", None) or self.text)) != top_level(self.text)

    @property
    def is_bound(self) -> bool:
        return isinstance(self.owner, type) and not isinstance(self.raw, staticmethod)


def read(owner: Owner, name: str) -> Any:
    return vars(owner).get(name, MISSING)


def write(owner: Owner, name: str, value: Any) -> None:
    """Set the attribute, or delete it with MISSING, bypassing overrides of `__setattr__`."""
    kind = type if isinstance(owner, type) else ModuleType
    if value is not MISSING:
        kind.__setattr__(owner, name, value)
    elif name in vars(owner):
        kind.__delattr__(owner, name)


def describe(owner: Owner, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return f"{vars(owner).get('__name__')}:{name}"


def resolve(text: str) -> Target:
    """Import the module and look the attribute up without binding or computing."""
    module_name, path = parse(text)
    owner: Owner = None
    raw = _import(text, module_name)
    for name in path:
        owner, raw = _step(text, raw, name)
    if isinstance(owner, type) and top_level(owner.__module__) != top_level(text):
        raise TargetError(
            f"`{text}` is inherited from `{describe(owner, path[-1])}`, outside `{top_level(text)}`; "
            "name a class of the package that defines it itself."
        )
    return Target(text, owner, path[-1], raw)


def vacancy(text: str) -> Place | None:
    """Place for a provided symbol; None if the host has it."""
    module_name, path = parse(text)
    scope = _import(text, module_name)
    for name in path[:-1]:
        scope = _step(text, scope, name)[1]
    found = next((vars(each)[path[-1]] for each in _scopes(scope) if path[-1] in vars(each)), None)
    return (scope, path[-1]) if found is None or found is False else None


def _import(text: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # broken optional dependencies may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise TargetError(f"`{text}`: importing `{module_name}` fails ({problem}).") from error


def _scopes(scope: Any) -> tuple[Any, ...]:
    return scope.__mro__ if isinstance(scope, type) else (scope,)


def _step(text: str, scope: Any, name: str) -> tuple[Owner, Any]:
    if not isinstance(scope, ModuleType | type):
        raise TargetError(f"`{text}`: `{name}` is looked for in neither a module nor a class.")
    for owner in _scopes(scope):
        if name in vars(owner):
            return owner, vars(owner)[name]
    raise TargetError(f"`{text}` does not exist: `{scope.__name__}` has no `{name}`.")


def unwrap(raw: Any) -> Any:
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw
