"""What Megatron is at a moment, attribute by attribute, and what has changed between two moments.

A snapshot holds what it names, so that nothing else takes its place in memory. Tests take hundreds, of tens of
thousands of attributes: what is as it was in the last one is shared with it, and told apart without a loop in Python.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from operator import attrgetter, is_
from typing import Any, NamedTuple


class _Space(NamedTuple):
    """A module's or a class's attributes, and what its functions are made of: the same part of each, in order."""

    values: dict[str, Any]
    functions: dict[str, types.FunctionType]
    codes: list[Any]
    defaults: list[Any]
    #: Keyword defaults and attributes of functions, by function, kind and key.
    more: dict[str, Any]

    def parts(self) -> dict[str, Any]:
        """All that functions are made of, by function and part."""
        names = [*self.functions]
        codes = {f"{name} __code__": each for name, each in zip(names, self.codes, strict=True)}
        defaults = {f"{name} __defaults__": each for name, each in zip(names, self.defaults, strict=True)}
        return codes | defaults | self.more


# By the text before an attribute's name: `module:` or `module:Class.`.
Snapshot = dict[str, _Space]

_NOTHING = _Space({}, {}, [], [], {})
_ABSENT = object()
# Python's own, made when they are first needed.
_CACHES = ("__warningregistry__", "__builtins__", "__slotnames__")
_INSIDE = {staticmethod: "__func__", classmethod: "__func__", types.MethodType: "__func__", property: "fget"}
_code, _defaults = attrgetter("__code__"), attrgetter("__defaults__")
_keywords, _attributes = attrgetter("__kwdefaults__"), attrgetter("__dict__")
# Of the last snapshot.
_last: Snapshot = {}


def snapshot(more: Collection[str] = ()) -> Snapshot:
    """Every attribute of Megatron's loaded modules, of the classes defined there, and of the modules `more`."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or (name.partition(".")[0] != "megatron" and name not in more):
            continue
        space = found[f"{name}:"] = _taken(f"{name}:", vars(module))
        for value in space.values.values():
            if isinstance(value, type) and value.__module__ == name:
                owner = f"{name}:{value.__qualname__}."
                found[owner] = _taken(owner, vars(value))
    return found


def _taken(owner: str, space: Any) -> _Space:
    """The space that the last snapshot took of `owner` if nothing has changed since."""
    values = dict(space)
    for name in _CACHES:
        values.pop(name, None)
    last = _last.get(owner, _NOTHING)
    is_same = _same(last.values, values)
    functions = last.functions if is_same else _functions(values)
    codes, defaults = ([*map(part, functions.values())] for part in (_code, _defaults))
    more = {
        f"{name} {kind} {key}": value
        for kind, part in (("__kwdefaults__", _keywords), ("__dict__", _attributes))
        for name, each in zip(functions, map(part, functions.values()), strict=True)
        if each
        for key, value in each.items()
    }
    is_same = is_same and all(map(is_, last.codes, codes)) and all(map(is_, last.defaults, defaults))
    if not is_same or not _same(last.more, more):
        _last[owner] = _Space(values, functions, codes, defaults, more)
    return _last.get(owner, _NOTHING)


def _functions(values: dict[str, Any]) -> dict[str, types.FunctionType]:
    insides = ((name, _INSIDE.get(type(value)), value) for name, value in values.items())
    found = ((name, getattr(value, inside) if inside else value) for name, inside, value in insides)
    return {name: each for name, each in found if type(each) is types.FunctionType}


def changed(before: Snapshot, after: Snapshot) -> set[str]:
    """The places that hold another object, `module:Class.name`, or whose functions do, `module:name __code__`."""
    found: set[str] = set()
    for owner in before.keys() | after.keys():
        one, other = before.get(owner, _NOTHING), after.get(owner, _NOTHING)
        if one is other:
            continue
        found |= {f"{owner}{name}" for name in _differing(one.values, other.values)}
        both = one.functions.keys() & other.functions.keys()
        parts = _differing(one.parts(), other.parts())
        found |= {f"{owner}{part}" for part in parts if part.partition(" ")[0] in both}
    return found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and [*one] == [*other]


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    if _same(one, other):
        return []
    return [name for name in one.keys() | other.keys() if one.get(name, _ABSENT) is not other.get(name, _ABSENT)]


def forget() -> None:
    """Let the next snapshot share nothing with the last, which this keeps alive no more."""
    _last.clear()


def held(where: Snapshot, place: str) -> Any:
    """What stands at a place of a snapshot, also where only a part of it has changed; None if nothing does."""
    place = place.partition(" ")[0]
    colon = place.index(":") + 1
    name = max(colon, place.rfind(".", colon) + 1)
    return where.get(place[:name], _NOTHING).values.get(place[name:])
