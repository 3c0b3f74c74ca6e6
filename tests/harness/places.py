"""What Megatron is at a moment, attribute by attribute, and what has changed between two moments.

A snapshot holds what it names, so that nothing else takes its place in memory. Taking and comparing one runs no Python
code for an attribute that is no function: tests take hundreds, of tens of thousands of attributes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from operator import is_
from typing import Any, NamedTuple


class _Space(NamedTuple):
    """A module's or a class's attributes, and by attribute what its function is made of."""

    values: dict[str, Any]
    parts: dict[str, dict[str, Any]]


# By the text before an attribute's name: `module:` or `module:Class.`.
Snapshot = dict[str, _Space]

_NOTHING = _Space({}, {})
_ABSENT = object()
# Python's own, made when they are first needed.
_CACHES = ("__warningregistry__", "__builtins__", "__slotnames__")
_INSIDE = {staticmethod: "__func__", classmethod: "__func__", types.MethodType: "__func__", property: "fget"}


def snapshot(more: Collection[str] = ()) -> Snapshot:
    """Every attribute of Megatron's loaded modules, of the classes defined there, and of the modules `more`."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or (name.partition(".")[0] != "megatron" and name not in more):
            continue
        space = found[f"{name}:"] = _taken(vars(module))
        for value in space.values.values():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}:{value.__qualname__}."] = _taken(vars(value))
    return found


def _taken(space: Any) -> _Space:
    values = dict(space)
    for name in _CACHES:
        values.pop(name, None)
    parts = {}
    for name, value in values.items():
        kind = type(value)
        function = getattr(value, _INSIDE[kind]) if kind in _INSIDE else value
        if type(function) is types.FunctionType:
            inside = {"__code__": function.__code__, "__defaults__": function.__defaults__}
            for owner in ("__kwdefaults__", "__dict__"):
                inside |= {f"{owner} {key}": each for key, each in (getattr(function, owner) or {}).items()}
            parts[name] = inside
    return _Space(values, parts)


def changed(before: Snapshot, after: Snapshot) -> set[str]:
    """The places that hold another object, `module:Class.name`, or whose functions do, `module:name __code__`."""
    found: set[str] = set()
    for owner in before.keys() | after.keys():
        one, other = before.get(owner, _NOTHING), after.get(owner, _NOTHING)
        found |= {f"{owner}{name}" for name in _differing(one.values, other.values)}
        for name in one.parts.keys() & other.parts.keys():
            found |= {f"{owner}{name} {part}" for part in _differing(one.parts[name], other.parts[name])}
    return found


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    if len(one) == len(other) and all(map(is_, one.values(), other.values())) and [*one] == [*other]:
        return []
    return [name for name in one.keys() | other.keys() if one.get(name, _ABSENT) is not other.get(name, _ABSENT)]


def held(where: Snapshot, place: str) -> Any:
    """What stands at a place of a snapshot, also where only a part of it has changed; None if nothing does."""
    place = place.partition(" ")[0]
    colon = place.index(":") + 1
    name = max(colon, place.rfind(".", colon) + 1)
    return where.get(place[:name], _NOTHING).values.get(place[name:])
