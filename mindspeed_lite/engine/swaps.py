"""Applies patches, all or none, and removes them in any order.

A Python function keeps its identity, so that every alias, pickle and running model follows: its code calls the
replacement. Anything else is assigned at the named place only. A change recomposes each place from its original.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from .errors import ApplyError, EngineError
from .feature import Around, Override, Patch, Provide
from .signatures import make_by_name, signature_difference
from .target import MISSING, Owner, Place, describe, read, resolve, unwrap, vacancy, write

_SLOT = "_mindspeed_lite"

_log = logging.getLogger("mindspeed_lite")
_LOCK = threading.RLock()
_SITES: dict[Any, _Site] = {}


@dataclass(frozen=True, eq=False)
class Swap:
    """One patch of a feature."""

    feature: str
    patch: Patch
    session: Any

    @property
    def rank(self) -> tuple[int, int, str]:
        return int(isinstance(self.patch, Around)), self.patch.order, self.feature

    def compose(self, current: Any, bound: bool) -> Any:
        patch = self.patch
        if isinstance(patch, Provide):
            return patch.make(self.session)
        if isinstance(patch, Override) and patch.by_name:
            new = make_by_name(patch.make, current, self.session)
        else:
            new = patch.make(current, self.session)
        if callable(current) and not callable(new):
            raise TypeError(f"`make` returned {new!r}, which cannot be called")
        if new is not current and isinstance(new, FunctionType) and callable(current):
            different = signature_difference(current, new, bound=bound)
            if different:
                raise TypeError(f"the wrapper cannot be called like the target: {different}")
            if "<locals>" in new.__qualname__:
                functools.update_wrapper(new, current, updated=())
        return new


class _Site(ABC):
    """A place with its original and patches; `placed`: replacement, or MISSING."""

    def __init__(self, where: str, original: Any, bound: bool) -> None:
        self.where = where
        self.original = original
        self.bound = bound
        self.swaps: list[Swap] = []
        self.placed: Any = MISSING

    def compose(self) -> Any:
        current = self.original
        for swap in self.swaps:
            with blame(swap):
                current = swap.compose(current, self.bound)
        return MISSING if current is self.original else current

    @abstractmethod
    def put(self, value: Any) -> None: ...

    @abstractmethod
    def is_foreign(self) -> bool:
        """Whether a third party has changed the place since."""


class _Function(_Site):
    def __init__(self, function: FunctionType, where: str, bound: bool) -> None:
        super().__init__(where, _copy(function), bound)
        self.function = function
        self._code = self._calling = function.__code__
        # Through these torch.compile would find its compiled function.
        self._hidden = {name: value for name, value in vars(function).items() if name.startswith("_torchdynamo")}

    def put(self, value: Any) -> None:
        # Single assignments in this order: other threads may call the function meanwhile.
        function = self.function
        keywords = {key: each for key, each in (function.__kwdefaults__ or {}).items() if key != _SLOT}
        if value is MISSING:
            function.__code__ = self._code
            below = {key: each for key, each in (self.original.__kwdefaults__ or {}).items() if key == _SLOT}
            function.__kwdefaults__ = {**keywords, **below} or None
            vars(function).pop("__wrapped__", None)
            kept = ("__wrapped__", *self._hidden)
            vars(function).update({key: each for key, each in vars(self.original).items() if key in kept})
        else:
            function.__kwdefaults__ = {**keywords, _SLOT: value}
            takes_more = isinstance(value, FunctionType) and bool(value.__code__.co_flags & inspect.CO_VARKEYWORDS)
            function.__code__ = self._calling = _calling_code(self._code, takes_more)
            for name in self._hidden:
                vars(function).pop(name, None)
            function.__wrapped__ = self.original  # type: ignore[attr-defined]
        self.placed = value

    def is_foreign(self) -> bool:
        return self.function.__code__ is not self._calling


class _Attribute(_Site):
    def __init__(self, owner: Owner, name: str) -> None:
        super().__init__(describe(owner, name), read(owner, name), False)
        self.owner = owner
        self.name = name

    def put(self, value: Any) -> None:
        write(self.owner, self.name, self.original if value is MISSING else value)
        self.placed = value

    def is_foreign(self) -> bool:
        return read(self.owner, self.name) is not (self.original if self.placed is MISSING else self.placed)


def change(
    *, add: Sequence[Swap] = (), remove: Collection[Swap] = (), then: Callable[[], object] | None = None
) -> list[str]:
    """Remove and add patches; on failure change nothing and raise ApplyError.

    Returns what was left alone because a third party has changed it. A failure of `then`, called at the end, undoes
    everything.
    """
    left: list[str] = []
    before: dict[_Site, tuple[list[Swap], Any]] = {}
    begun: list[_Site] = []
    with _LOCK:
        try:
            for site in _SITES.values():
                if any(swap in remove for swap in site.swaps):
                    before[site] = site.swaps, site.placed
                    site.swaps = [swap for swap in site.swaps if swap not in remove]
            for swap in add:
                with blame(swap):
                    found = _site_of(swap)
                if found is not None:
                    before.setdefault(found, (found.swaps, found.placed))
                    found.swaps = sorted([*found.swaps, swap], key=lambda each: each.rank)
            # Provided symbols first: replacements may read them.
            for site in sorted(before, key=lambda each: not any(isinstance(s.patch, Provide) for s in each.swaps)):
                value = site.compose()
                if _may_be_put(site, value, add, left):
                    begun.append(site)
                    _put(site, value)
            if then is not None:
                then()
        except BaseException:
            for site, (swaps, placed) in before.items():
                site.swaps = swaps
                try:
                    if site in begun:
                        site.put(placed)
                except Exception:  # the first error is raised
                    _log.exception("`%s` could not be restored", site.where)
            raise
        finally:
            for key in [key for key, site in _SITES.items() if not site.swaps]:
                del _SITES[key]
    return left


def _may_be_put(site: _Site, value: Any, add: Sequence[Swap], left: list[str]) -> bool:
    if site.placed is MISSING:
        return value is not MISSING
    if not site.is_foreign():
        return True
    for swap in site.swaps:
        if swap in add:
            with blame(swap):
                raise EngineError(f"`{site.where}` was changed by another party since another feature patched it")
    left.append(f"`{site.where}` was changed by another party and stays so")
    return False


def _put(site: _Site, value: Any) -> None:
    try:
        site.put(value)
    except Exception as error:
        raise ApplyError(
            f"`{site.where}` could not be changed ({type(error).__name__}: {error}); nothing has been changed.",
            feature=site.swaps[-1].feature if site.swaps else "",
        ) from error


def _site_of(swap: Swap) -> _Site | None:
    patch = swap.patch
    if isinstance(patch, Provide):
        place = provided(patch.target) or vacancy(patch.target)
        if place is None:
            return None
    else:
        target = resolve(patch.target)
        function = function_in(target.raw)
        # Another package uses its function too: only this place changes then.
        if function is not None and not target.is_foreign:
            return _SITES.setdefault(id(function), _Function(function, target.text, target.is_bound))
        if isinstance(target.raw, type | staticmethod | classmethod | property):
            raise EngineError(f"`{patch.target}` is a {type(target.raw).__name__} and no Python function")
        place = target.owner, target.name
    return _SITES.setdefault((id(place[0]), place[1]), _Attribute(*place))


def replace_function(function: FunctionType, make: Callable[[Any], Any], undo: ExitStack) -> None:
    """Let a function call `make(original)`, outside of any feature, until `undo` is closed."""
    site = _Function(function, function.__qualname__, False)
    undo.callback(site.put, MISSING)
    site.put(make(site.original))


def provided(text: str) -> Place | None:
    for site in _SITES.values():
        if isinstance(site, _Attribute) and any(each.patch.target == text for each in site.swaps):
            return site.owner, site.name
    return None


def function_in(raw: Any) -> FunctionType | None:
    inner = unwrap(raw)
    return inner if type(inner) is FunctionType else None


def original_of(raw: Any) -> Any:
    site = _SITES.get(id(function_in(raw)))
    if isinstance(site, _Function):
        return site.original
    for each in _SITES.values():
        if isinstance(each, _Attribute) and raw is not MISSING and each.placed is raw:
            return each.original
    return raw


def in_force() -> list[Swap]:
    return [swap for site in _SITES.values() for swap in site.swaps]


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__, copy.__doc__ = function.__qualname__, function.__module__, function.__doc__
    copy.__annotations__ = function.__annotations__
    vars(copy).update(vars(function))
    return copy


@functools.cache
def _calling_code(like: CodeType, takes_more: bool) -> CodeType:
    """Code with the signature of `like` that calls the wrapper in keyword default `_SLOT`.

    takes_more: it accepts further keywords, for overrides with more than the target.
    """
    flags, names = like.co_flags, list(like.co_varnames)
    positional, keyword = names[: like.co_argcount], names[like.co_argcount :][: like.co_kwonlyargcount]
    keyword = [each for each in keyword if each != _SLOT]  # of a replacement below
    rest = names[like.co_argcount + like.co_kwonlyargcount :]
    star = rest.pop(0) if flags & inspect.CO_VARARGS else ""
    stars = rest.pop(0) if flags & inspect.CO_VARKEYWORDS else "_more" if takes_more else ""
    only = like.co_posonlyargcount
    # Defaults belong to the function, not its code.
    parameters = [*positional[:only], *(["/"] if only else []), *positional[only:], f"*{star}" if star else "*"]
    parameters += [*keyword, _SLOT, *([f"**{stars}"] if stars else [])]
    call = [*positional, *([f"*{star}"] if star else []), *(f"{name}={name}" for name in keyword)]
    call += [f"**{stars}"] if stars else []
    free = [f"_free{index}" for index in range(len(like.co_freevars))]
    name = like.co_name if like.co_name.isidentifier() else "swapped"
    source = (
        f"def outer({', '.join(free)}):\n def {name}({', '.join(parameters)}):\n"
        f"  return {_SLOT}({', '.join(call)})\n  {'; '.join(free) or 'pass'}\n return {name}.__code__\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source, "<mindspeed_lite swap>", "exec"), space)
    found: CodeType = space["outer"](*free)
    return found


@contextmanager
def blame(swap: Swap) -> Iterator[None]:
    """Re-raise as an ApplyError that names feature and target."""
    try:
        yield
    except ApplyError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
        raise ApplyError(
            f"feature `{swap.feature}` could not {swap.patch.kind} `{swap.patch.target}` ({kind}{error}); "
            "nothing has been changed, turn the feature off to go on.",
            feature=swap.feature,
        ) from error
