"""Resolves "package.mod:Class.attr" to its owner and raw attribute."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from typing import Any

from .errors import TargetError

Owner = Any  # a module, a class, or sys.modules
Place = tuple[Owner, str]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SYNTAX = re.compile(rf"({_NAME})(?::({_NAME}))?")


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise TargetError(f"`{text}` is not a target; write `package.module:Class.attribute`.")
    return found[1], tuple(found[2].split(".")) if found[2] else ()


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


def namespace(owner: Owner) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def read(owner: Owner, name: str) -> Any:
    return namespace(owner).get(name, MISSING)


def write(owner: Owner, name: str, value: Any) -> None:
    """Set the attribute, or delete it with MISSING, bypassing `__setattr__`."""
    if value is MISSING and name not in namespace(owner):
        return
    if isinstance(owner, type):
        type.__delattr__(owner, name) if value is MISSING else type.__setattr__(owner, name, value)
    elif value is MISSING:
        del namespace(owner)[name]
    else:
        namespace(owner)[name] = value


def describe(owner: Owner, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return name if isinstance(owner, dict) else f"{vars(owner).get('__name__')}:{name}"


def resolve(text: str) -> Target:
    """Import the module and look the attribute up without binding or computing."""
    module_name, path = parse(text)
    if not path:
        raise TargetError(f"`{text}` names a module; write `package.module:Class.attribute`.")
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
    """Place for a provided symbol or module; None if the host has it."""
    module_name, path = parse(text)
    if path:
        scope = _import(text, module_name)
        for name in path[:-1]:
            scope = _step(text, scope, name)[1]
        found = next((space[path[-1]] for space in map(namespace, _scopes(scope)) if path[-1] in space), None)
        return (scope, path[-1]) if found is None or found is False else None
    if sys.modules.get(module_name) is not None:
        return None
    try:
        real = module_name not in sys.modules and importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        real = False
    return None if real else (sys.modules, module_name)


def _import(text: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # broken optional dependencies may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise TargetError(f"`{text}`: importing `{module_name}` fails ({problem}).") from error


def _scopes(scope: Any) -> tuple[Any, ...]:
    return scope.__mro__ if isinstance(scope, type) else (scope,)


def _step(text: str, scope: Any, name: str) -> tuple[Owner, Any]:
    if not isinstance(scope, type(sys) | type):
        raise TargetError(f"`{text}`: `{name}` is looked for in neither a module nor a class.")
    for owner in _scopes(scope):
        if name in vars(owner):
            return owner, vars(owner)[name]
    raise TargetError(f"`{text}` does not exist: `{scope.__name__}` has no `{name}`.")


def unwrap(raw: Any) -> Any:
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw
