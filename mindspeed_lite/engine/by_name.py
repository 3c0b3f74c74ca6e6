"""Fits one replacement to its target's signatures across releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def make_by_name(make: Callable[..., Any], wrapped: Callable[..., Any], session: Any) -> Any:
    """`make(wrapped, session)` with the signature of `wrapped`.

    The replacement's own parameters keep defaults and are dropped in calls to `wrapped`. Parameters that only `wrapped`
    has cause a fallback if set.
    """
    signature = inspect.signature(wrapped)
    theirs = signature.parameters
    takes_more = any(each.kind is Parameter.VAR_KEYWORD for each in theirs.values())
    ours: Mapping[str, Parameter] = {}

    def original(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(ours, args, strict=False)), **kwargs}
        accepted = given if takes_more else {name: given[name] for name in theirs if name in given}
        return wrapped(*_leading(theirs, accepted), **accepted)

    replacement = make(original, session)
    ours = _named(inspect.signature(replacement).parameters)
    named = _named(theirs)
    grown = {name: each.default for name, each in named.items() if name not in ours}
    lost = [name for name, each in ours.items() if name not in theirs and each.default is Parameter.empty]
    if lost:
        raise TypeError(f"target lost parameter `{lost[0]}`")
    if not grown and list(named) == list(ours)[: len(named)]:
        replacement.__signature__ = signature
        return replacement
    positional = [name for name, each in theirs.items() if each.kind in _POSITIONAL]

    def fitted(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        unknown = [name for name, default in grown.items() if given.pop(name, default) is not default]
        if unknown:
            session.fallback(
                session.feature,
                f"`{unknown[0]}` is set, a parameter of `{wrapped.__qualname__}` in this release that the feature does "
                "not serve",
            )
            return wrapped(*args, **kwargs)
        return replacement(**given)

    fitted.__signature__ = signature  # type: ignore[attr-defined]
    return fitted


def _named(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    return {name: each for name, each in parameters.items() if each.kind not in _VARIADIC}


def _leading(parameters: Mapping[str, Parameter], given: dict[str, Any]) -> list[Any]:
    """Pop leading positional arguments: wrappers may name the first differently."""
    found = []
    for name, each in parameters.items():
        if each.kind not in _POSITIONAL or name not in given:
            break
        found.append(given.pop(name))
    return found
