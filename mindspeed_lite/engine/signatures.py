"""Signatures: comparison of a replacement with its target, and calls by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any

from .target import unwrap

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def render_signature(parameters: Iterable[Parameter]) -> str:
    """Normalised signature: keyword-only names sorted, defaults as `=`, names of * and ** dropped."""
    by_kind: dict[Any, list[str]] = {}
    for each in parameters:
        by_kind.setdefault(each.kind, []).append(each.name if each.default is Parameter.empty else f"{each.name}=")
    words = by_kind.get(Parameter.POSITIONAL_ONLY, [])
    words += ["/"] if words else []
    words += by_kind.get(Parameter.POSITIONAL_OR_KEYWORD, [])
    keyword = sorted(by_kind.get(Parameter.KEYWORD_ONLY, []))
    words += ["*args"] if Parameter.VAR_POSITIONAL in by_kind else ["*"] if keyword else []
    return f"({', '.join(words + keyword + (['**kwargs'] if Parameter.VAR_KEYWORD in by_kind else []))})"


def _parameters(function: Any, follow_wrapped: bool) -> list[Parameter] | None:
    try:
        return list(inspect.signature(unwrap(function), follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError, NameError):
        return None


def signature_difference(original: Any, wrapper: Any, *, bound: bool = False) -> str:
    """Why `wrapper` cannot be called like `original`; "" if it can.

    `bound`: ignore the first parameter's name. With *args and **kwargs parameters need not be named.
    """
    theirs, ours = _parameters(original, True), _parameters(wrapper, False)
    if theirs is None:
        return ""
    if ours is None:
        return "the signature of the wrapper cannot be read"
    clause = f"the target takes {render_signature(theirs)}, the wrapper {render_signature(ours)}"
    if bound and theirs and ours and theirs[0].kind in _POSITIONAL and ours[0].kind in _POSITIONAL:
        theirs, ours = theirs[1:], ours[1:]
    if {each.kind for each in ours} >= set(_VARIADIC):
        ours = [each for each in ours if each.kind not in _VARIADIC]
        named, leading = {each.name for each in ours}, sum(each.kind in _POSITIONAL for each in ours)
        keyword = [each for each in theirs if each.kind is Parameter.KEYWORD_ONLY and each.name in named]
        theirs = [each for each in theirs if each.kind in _POSITIONAL][:leading] + keyword
    required = {each.name for each in theirs if each.default is Parameter.empty}
    # Only the presence of defaults counts; the wrapper may have more.
    shown = [
        render_signature(
            each.replace(default=Parameter.empty) if each.name in required else each for each in parameters
        )
        for parameters in (theirs, ours)
    ]
    return "" if shown[0] == shown[1] else clause


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
