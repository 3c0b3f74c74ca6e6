"""Resolves "package.mod:Class.attr" to owner, raw attribute and by-value imports."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from .errors import TargetError

Owner = Any  # a module, a class, or sys.modules
Place = tuple[Owner, str]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_CACHED = type(functools.lru_cache(len))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, _CACHED)
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SYNTAX = re.compile(rf"({_NAME})(?::({_NAME}))?")

# This package may hold originals by value, to call them.
DEFAULT_SKIP = (sys.stdlib_module_names - {"__main__"}) | {__name__.partition(".")[0]}


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
    definer_text: str

    @property
    def is_foreign(self) -> bool:
        """Whether it is imported from another package; then only this place may change."""
        return top_level(self.definer_text) != top_level(self.text)

    @property
    def is_bound(self) -> bool:
        return is_class(self.owner) and not isinstance(self.raw, (staticmethod, type))


def is_class(found: Any) -> bool:
    return issubclass(type(found), type)


def namespace(owner: Owner) -> Any:
    if type(owner) is dict:
        return owner
    try:
        found = object.__getattribute__(owner, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict or is_class(owner) else None


def read(owner: Owner, name: str) -> Any:
    return namespace(owner).get(name, MISSING)


def write(owner: Owner, name: str, value: Any) -> None:
    """Set the attribute, or delete it with MISSING, bypassing `__setattr__`."""
    if value is MISSING and name not in namespace(owner):
        return
    if is_class(owner):
        type.__delattr__(owner, name) if value is MISSING else type.__setattr__(owner, name, value)
    elif value is MISSING:
        del namespace(owner)[name]
    else:
        namespace(owner)[name] = value


def key_of(owner: Owner, name: str) -> tuple[int, str]:
    # Class dictionaries are new proxies each time; a module may have two names in sys.modules.
    return id(owner if is_class(owner) else namespace(owner)), name


def describe(owner: Owner, name: str) -> str:
    if is_class(owner):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return name if type(owner) is dict else f"{namespace(owner).get('__name__')}:{name}"


def resolve(text: str) -> Target:
    """Import the module and look the attribute up without binding or computing."""
    module_name, path = parse(text)
    if not path:
        raise TargetError(f"`{text}` names a module; write `package.module:Class.attribute`.")
    owner: Owner = _import(text, module_name)
    raw: Any = owner
    for name in path:
        owner, raw = _step(text, raw, name)
    if is_class(owner):
        definer_text = describe(owner, path[-1])
        if top_level(definer_text) != top_level(text):
            raise TargetError(
                f"`{text}` is inherited from `{definer_text}`, outside `{top_level(text)}`; "
                "name a class of the package that defines it itself."
            )
    else:
        definer_text = home_of(raw) or describe(owner, path[-1])
    return Target(text, owner, path[-1], raw, definer_text)


def vacancy(text: str) -> Place | None:
    """Place for a provided symbol or module; None if the host has it."""
    module_name, path = parse(text)
    if path:
        scope: Any = _import(text, module_name)
        for name in path[:-1]:
            scope = _step(text, scope, name)[1]
        found = next((namespace(each)[path[-1]] for each in _scopes(scope) if path[-1] in namespace(each)), None)
        return (scope, path[-1]) if found is None or found is False else None
    if sys.modules.get(module_name) is not None:
        return None
    try:
        real = module_name not in sys.modules and importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        real = False
    return None if real else (sys.modules, module_name)


def _import(text: str, module_name: str) -> ModuleType:
    try:
        module = importlib.import_module(module_name)
        vars(module)
        return module
    except Exception as error:  # broken optional dependencies may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise TargetError(f"`{text}`: importing `{module_name}` fails ({problem}).") from error


def _scopes(scope: Any) -> Sequence[Any]:
    return scope.__mro__ if is_class(scope) else (scope,)


def _step(text: str, scope: Any, name: str) -> tuple[Owner, Any]:
    if namespace(scope) is None or not isinstance(scope, ModuleType | type):
        raise TargetError(f"`{text}`: `{name}` is looked for in neither a module nor a class.")
    for owner in _scopes(scope):
        if name in namespace(owner):
            return owner, namespace(owner)[name]
    raise TargetError(f"`{text}` does not exist: `{getattr(scope, '__name__', scope)}` has no `{name}`.")


def home_of(raw: Any) -> str | None:
    if not isinstance(raw, (*_FUNCTIONS, type)):
        return None
    module_name, qualname = getattr(raw, "__module__", None), getattr(raw, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        return None
    found: Any = sys.modules.get(module_name)
    for name in qualname.split("."):
        space = namespace(found)
        found = None if space is None else space.get(name)
    return f"{module_name}:{qualname}" if found is raw else None


def unwrap(raw: Any) -> Any:
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(like: Any, new: Any) -> Any:
    """Wrap `new` in the descriptor kind of `like`."""
    if new is unwrap(like):
        return like
    if isinstance(new, staticmethod | classmethod | property):
        return new
    if isinstance(like, property):
        return property(new, like.fset, like.fdel, like.__doc__)
    if isinstance(like, staticmethod):
        return staticmethod(new)
    return classmethod(new) if isinstance(like, classmethod) else new


def holders(
    objects: Iterable[object], *, skip: Collection[str] = DEFAULT_SKIP, packages: Collection[str] = ()
) -> dict[int, list[Place]]:
    """By id, all places that hold one of the objects.

    Searches modules outside the top-level names in `skip`, and classes of those in `packages`.
    """
    found: dict[int, list[Place]] = {id(each): [] for each in objects}
    seen: set[int] = set()
    for key, module in list(sys.modules.items()):
        top = key.partition(".")[0] if isinstance(key, str) else ""
        if top in skip:
            continue
        space = namespace(module)
        if type(space) is dict and id(space) not in seen:
            seen.add(id(space))
            _search(module, space, found)
            if top in packages:
                _search_classes(space, found, seen, packages)
    return found


def _search(owner: Owner, space: Any, found: dict[int, list[Place]]) -> None:
    # Fast path: nearly all dictionaries hold none of the objects.
    values = list(space.values())
    if found.keys().isdisjoint(map(id, values)):
        return
    for name, value in list(space.items()):
        if id(value) in found:
            found[id(value)].append((owner, name))


def _search_classes(space: Any, found: dict[int, list[Place]], seen: set[int], packages: Collection[str]) -> None:
    for value in list(space.values()):
        if is_class(value) and id(value) not in seen:
            seen.add(id(value))
            inside = namespace(value)
            if top_level(str(inside.get("__module__", ""))) in packages:
                _search(value, inside, found)
                _search_classes(inside, found, seen, packages)


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
