"""From "package.mod:Class.attr" to the place that defines it, what stands there raw, and who holds a copy."""

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

Owner = Any  # a module, a class, or sys.modules itself
Place = tuple[Owner, str]

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

_CACHED = type(functools.lru_cache(len))
_DESCRIPTORS = (staticmethod, classmethod, property)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, _CACHED)
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SYNTAX = re.compile(rf"({_NAME})(?::({_NAME}))?")

# The engine's own package keeps originals by value on purpose: a replacement may call what it replaced.
DEFAULT_SKIP = (sys.stdlib_module_names - {"__main__"}) | {__name__.partition(".")[0]}


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """Module name and attribute path; the path is empty where the text names a module."""
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise TargetError(f"`{text}` is not a target; write `package.module:Class.attribute`.")
    return found[1], tuple(found[2].split(".")) if found[2] else ()


def top_level(text: str) -> str:
    return re.split(r"[.:]", text, maxsplit=1)[0]


@dataclass(frozen=True, eq=False)
class Target:
    """An attribute as it stands: `owner` defines `name`; `raw` is what its dictionary holds, unbound."""

    text: str
    owner: Owner
    name: str
    raw: Any
    definer_text: str

    @property
    def is_foreign(self) -> bool:
        """Whether the package only imported it; then just the named place changes, not every holder."""
        return top_level(self.definer_text) != top_level(self.text)

    @property
    def is_shared(self) -> bool:
        """Whether others may hold it by value; a plain value such as None or 1 has no identity to trace."""
        return not self.is_foreign and (callable(self.raw) or isinstance(self.raw, _DESCRIPTORS))

    @property
    def is_bound(self) -> bool:
        """Whether its first parameter is the instance or the class."""
        return is_class(self.owner) and not isinstance(self.raw, (staticmethod, type))


def is_class(found: Any) -> bool:
    """Unlike isinstance, asks no lazy object for its `__class__`."""
    return issubclass(type(found), type)


def namespace(owner: Owner) -> Any:
    """The raw dictionary of a module or class, past any lazy loading its type may do; None if it has none."""
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
    """Set, or with MISSING delete what is there, past any `__setattr__` of the owner."""
    if value is MISSING and name not in namespace(owner):
        return
    if is_class(owner):
        type.__delattr__(owner, name) if value is MISSING else type.__setattr__(owner, name, value)
    elif value is MISSING:
        del namespace(owner)[name]
    else:
        namespace(owner)[name] = value


def key_of(owner: Owner, name: str) -> tuple[int, str]:
    """Identity of a place."""
    # A class's dictionary is a new proxy at each look; a module's may serve under two names in sys.modules.
    return id(owner if is_class(owner) else namespace(owner)), name


def describe(owner: Owner, name: str) -> str:
    if is_class(owner):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return name if type(owner) is dict else f"{namespace(owner).get('__name__')}:{name}"


def resolve(text: str) -> Target:
    """Import the module and walk to the attribute through raw dictionaries: nothing is bound or computed."""
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
    """Where a provided symbol or module would go; None if a real one stands there."""
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
        vars(module)  # one that loads lazily loads now
        return module
    except Exception as error:  # with an optional dependency broken, a module may fail with anything
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
    """Where a function or class says it was defined, if it really stands there."""
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
    """The function inside a descriptor; anything else as it is."""
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(like: Any, new: Any) -> Any:
    """`new` as the kind of descriptor that `like` is, unless it is a descriptor already."""
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
    """Every place that holds one of the objects, by identity and under whatever name, found in one pass.

    Looked through are modules outside the top-level names in `skip`, and the classes of those in `packages`.
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
            _look_through(module, space, found)
            if top in packages:
                _look_through_classes(space, found, seen, packages)
    return found


def _look_through(owner: Owner, space: Any, found: dict[int, list[Place]]) -> None:
    # Nearly all places hold none of the objects: those cost no Python code.
    values = list(space.values())
    if found.keys().isdisjoint(map(id, values)):
        return
    for name, value in list(space.items()):
        if id(value) in found:
            found[id(value)].append((owner, name))


def _look_through_classes(space: Any, found: dict[int, list[Place]], seen: set[int], packages: Collection[str]) -> None:
    for value in list(space.values()):
        if is_class(value) and id(value) not in seen:
            seen.add(id(value))
            inside = namespace(value)
            if top_level(str(inside.get("__module__", ""))) in packages:
                _look_through(value, inside, found)
                _look_through_classes(inside, found, seen, packages)


def render_signature(parameters: Iterable[tuple[str, Any, bool]]) -> str:
    """One spelling for (name, kind, has a default): keyword-only ones sorted, names of * and ** dropped."""
    rows = list(parameters)
    positional_only, plain, star, keyword, stars = (
        [f"{name}=" if defaulted else name for name, each, defaulted in rows if each is kind] for kind in _KINDS
    )
    words = [*positional_only, *(["/"] if positional_only else []), *plain]
    words += ["*args"] if star else ["*"] if keyword else []
    return f"({', '.join(words + sorted(keyword) + (['**kwargs'] if stars else []))})"


_KINDS = (
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)
_POSITIONAL: tuple[Any, ...] = _KINDS[:2]
_VARIADIC: tuple[Any, ...] = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _parameters(obj: Any, follow_wrapped: bool = True) -> list[Parameter] | None:
    try:
        return list(inspect.signature(unwrap(obj), follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError, NameError):
        return None


def signature_difference(original: Any, wrapper: Any, *, bound: bool = False) -> list[str]:
    """Reasons why `wrapper` cannot be called like `original`, one clause each; empty if it can.

    With `bound` the name of the first parameter is of no matter. A wrapper may pass through what it does not name as
    long as it takes both *args and **kwargs.
    """
    theirs, ours = _parameters(original), _parameters(wrapper, follow_wrapped=False)
    if theirs is None:
        return []
    if ours is None:
        return ["the signature of the wrapper cannot be read"]
    if bound and theirs and ours and theirs[0].kind in _POSITIONAL and ours[0].kind in _POSITIONAL:
        theirs, ours = theirs[1:], ours[1:]
    if {each.kind for each in ours} >= set(_VARIADIC):
        ours = [each for each in ours if each.kind not in _VARIADIC]
        named, leading = {each.name for each in ours}, sum(each.kind in _POSITIONAL for each in ours)
        positional = [each for each in theirs if each.kind in _POSITIONAL]
        keyword = [each for each in theirs if each.kind is Parameter.KEYWORD_ONLY and each.name in named]
        theirs = positional[:leading] + keyword
    return _difference(theirs, ours)


def _label(parameter: Parameter) -> str:
    if parameter.kind not in _VARIADIC:
        return parameter.name
    return "*args" if parameter.kind is Parameter.VAR_POSITIONAL else "**kwargs"


def _difference(theirs: list[Parameter], ours: list[Parameter]) -> list[str]:
    wanted, given = {_label(each): each for each in theirs}, {_label(each): each for each in ours}
    found = [f"target grew parameter `{name}`" for name in wanted if name not in given]
    found += [
        f"wrapper swallows `{name}`, which the target does not take"
        if each.kind in _VARIADIC
        else f"target lost parameter `{name}`"
        for name, each in given.items()
        if name not in wanted
    ]
    if found:
        return found
    order = [[each.name for each in side if each.kind in _POSITIONAL] for side in (theirs, ours)]
    if sorted(order[0]) == sorted(order[1]) and order[0] != order[1]:
        here, there = (", ".join(names) for names in reversed(order))
        return [f"order of parameters differs: ({there}) in the target, ({here}) here"]
    for name, each in wanted.items():
        mine = given[name]
        if each.kind is not mine.kind:
            kinds = f"{each.kind.description} in the target, {mine.kind.description} here"
            found.append(f"kind of parameter `{name}` differs: {kinds}")
        elif each.default is not Parameter.empty and mine.default is Parameter.empty:
            found.append(f"target made parameter `{name}` optional")
    return found
