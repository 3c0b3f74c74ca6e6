"""Applies patches, all or none, and removes them in any order.

Each change recomposes a place from its original. Python functions keep identity (imports by value, pickles): their code
calls the wrapper. Other attributes, and their by-value imports, are assigned.
"""

from __future__ import annotations

import abc
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .by_name import make_by_name
from .errors import ApplyError, EngineError
from .feature import Around, Override, Patch, Provide
from .target import (
    DEFAULT_SKIP,
    MISSING,
    Owner,
    Place,
    describe,
    holders,
    home_of,
    key_of,
    read,
    resolve,
    rewrap,
    signature_difference,
    top_level,
    unwrap,
    vacancy,
    write,
)

_SLOT = "_mindspeed_lite"

_log = logging.getLogger("mindspeed_lite")
_LOCK = threading.RLock()
_SITES: dict[Any, _Site] = {}


@dataclass(eq=False)
class Swap:
    """One patch of a feature; `holders`: by-value imports of its target."""

    feature: str
    patch: Patch
    session: Any
    holders: list[str] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int, str]:
        return int(isinstance(self.patch, Around)), self.patch.order, self.feature

    def compose(self, current: Any, bound: bool) -> Any:
        if isinstance(self.patch, Override) and self.patch.by_name and callable(current):
            new = make_by_name(self.patch.make, current, self.session)
        else:
            new = self.patch.make(current, self.session)
        if new is current or not isinstance(new, FunctionType) or not callable(current):
            if isinstance(self.patch, Around) and not callable(new):
                raise TypeError(f"`make` returned {new!r}, which cannot be called")
            return new
        different = signature_difference(current, new, bound=bound)
        if different:
            raise TypeError(f"the wrapper cannot be called like the target: {different}")
        if "<locals>" in new.__qualname__:
            functools.update_wrapper(new, current, updated=())
        return new


class _Site(abc.ABC):
    """A place, its original and patches; `placed`: replacement, or MISSING."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.swaps: list[Swap] = []
        self.placed: Any = MISSING

    @abc.abstractmethod
    def compose(self, swaps: Sequence[Swap]) -> Any: ...

    @abc.abstractmethod
    def put(self, value: Any, copies: Sequence[Place] = ()) -> None: ...

    @abc.abstractmethod
    def is_foreign(self) -> bool: ...


class _Function(_Site):
    def __init__(self, function: FunctionType, where: str, bound: bool) -> None:
        super().__init__(where)
        self.function = function
        self.original = _copy(function)
        self._bound = bound
        self._code = function.__code__
        self._calling = function.__code__
        # Through these torch.compile would find its compiled function.
        self._hidden = {name: value for name, value in function.__dict__.items() if name.startswith("_torchdynamo")}

    def compose(self, swaps: Sequence[Swap]) -> Any:
        current: Any = self.original
        for swap in swaps:
            with blame(swap):
                current = swap.compose(current, self._bound)
                if not callable(current):
                    raise TypeError(f"`make` returned {current!r}, which cannot be called")
        return MISSING if current is self.original else current

    def put(self, value: Any, copies: Sequence[Place] = ()) -> None:
        # Single assignments in this order: other threads may call the function meanwhile.
        function = self.function
        keywords = {key: each for key, each in (function.__kwdefaults__ or {}).items() if key != _SLOT}
        if value is MISSING:
            function.__code__ = self._code
            function.__kwdefaults__ = keywords or None
            function.__dict__.pop("__wrapped__", None)
            kept = ("__wrapped__", *self._hidden)
            function.__dict__.update({key: each for key, each in self.original.__dict__.items() if key in kept})
        else:
            function.__kwdefaults__ = {**keywords, _SLOT: value}
            takes_more = isinstance(value, FunctionType) and bool(value.__code__.co_flags & inspect.CO_VARKEYWORDS)
            self._calling = _calling_code(self._code, takes_more)
            function.__code__ = self._calling
            for name in self._hidden:
                function.__dict__.pop(name, None)
            function.__wrapped__ = self.original  # type: ignore[attr-defined]
        self.placed = value

    def is_foreign(self) -> bool:
        return self.function.__code__ is not self._calling


class _Attribute(_Site):
    def __init__(self, owner: Owner, name: str, *, shared: bool = True, bound: bool = False) -> None:
        super().__init__(describe(owner, name))
        self.owner = owner
        self.name = name
        self.shared = shared
        self.home = ""
        self.original = read(owner, name)
        self._bound = bound

    @property
    def standing(self) -> Any:
        return self.original if self.placed is MISSING else self.placed

    def compose(self, swaps: Sequence[Swap]) -> Any:
        current = self.original
        for swap in swaps:
            with blame(swap):
                if isinstance(swap.patch, Provide):
                    current = swap.patch.make(swap.session)
                    if isinstance(current, ModuleType) and current.__spec__ is None:
                        # find_spec raises for a loaded module without one.
                        current.__spec__ = ModuleSpec(current.__name__, None)
                else:
                    current = rewrap(current, swap.compose(unwrap(current), self._bound))
        return MISSING if current is self.original else current

    def put(self, value: Any, copies: Sequence[Place] = ()) -> None:
        standing = self.original if value is MISSING else value
        self.home = home_of(value) or ""
        foreign = self.is_foreign()
        self.placed = value
        if not foreign:
            write(self.owner, self.name, standing)
        for owner, name in copies if standing is not MISSING else ():
            write(owner, name, standing)

    def is_foreign(self) -> bool:
        return read(self.owner, self.name) is not self.standing


def change(
    *, add: Sequence[Swap] = (), remove: Collection[Swap] = (), then: Callable[[], object] | None = None
) -> list[str]:
    """Remove and add patches; on failure change nothing and raise ApplyError.

    Returns what was left alone because a third party has changed it. A failure of `then`, called at the end, undoes
    everything.
    """
    left: list[str] = []
    begun: list[_Site] = []
    before: dict[int, tuple[_Site, list[Swap], Any]] = {}
    copies: dict[int, list[Place]] = {}

    def affect(site: _Site, swaps: list[Swap]) -> None:
        before.setdefault(id(site), (site, site.swaps, site.placed))
        site.swaps = swaps

    def settle(site: _Site, value: Any) -> None:
        if _may_be_put(site, value, add, left):
            begun.append(site)
            _put(site, value, copies.get(id(site), []), left)

    with _LOCK:
        try:
            for site in _SITES.values():
                if any(swap in remove for swap in site.swaps):
                    affect(site, [swap for swap in site.swaps if swap not in remove])
            for swap in add:
                with blame(swap):
                    found = _site_of(swap)
                if found is not None:
                    affect(found, sorted([*found.swaps, swap], key=lambda each: each.rank))
            affected = [site for site, _, _ in before.values()]
            copies = _copies(affected)
            # Provided symbols first, in sequence: later ones and overrides may read them.
            symbols = [site for site in affected if any(isinstance(swap.patch, Provide) for swap in site.swaps)]
            for site in symbols:
                settle(site, site.compose(site.swaps))
            for site, value in [(site, site.compose(site.swaps)) for site in affected if site not in symbols]:
                settle(site, value)
            if then is not None:
                then()
        except BaseException:
            for site, swaps, placed in before.values():
                site.swaps = swaps
                try:
                    if site in begun:
                        site.put(placed, copies.get(id(site), []))
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
    # By-value imports of an attribute still have the replacement.
    return isinstance(site, _Attribute)


def _put(site: _Site, value: Any, copies: Sequence[Place], left: list[str]) -> None:
    if value is MISSING and isinstance(site, _Attribute) and site.original is MISSING:
        left += [f"`{describe(*each)}` keeps its copy of `{site.where}`, which did not exist before" for each in copies]
    try:
        site.put(value, copies)
    except Exception as error:
        raise ApplyError(
            f"`{site.where}` could not be changed ({type(error).__name__}: {error}); nothing has been changed.",
            feature=site.swaps[-1].feature if site.swaps else "",
        ) from error
    for swap in site.swaps:
        swap.holders = sorted(describe(*place) for place in copies)


def _copies(sites: Sequence[_Site]) -> dict[int, list[Place]]:
    shared = [
        site
        for site in sites
        if isinstance(site, _Attribute)
        and site.shared
        and (callable(site.standing) or isinstance(site.standing, ModuleType))
    ]
    if not shared:
        return {}
    own = set(_SITES)
    packages = {top_level(site.where) for site in sites}
    found = holders([site.standing for site in shared], skip=DEFAULT_SKIP, packages=packages)
    return {
        id(site): [
            place
            for place in found[id(site.standing)]
            # A replacement stays where it is defined.
            if key_of(*place) not in own and describe(*place) != site.home
        ]
        for site in shared
    }


def _site_of(swap: Swap) -> _Site | None:
    patch = swap.patch
    if isinstance(patch, Provide):
        place = provided(patch.target) or vacancy(patch.target)
        if place is None:
            return None
        owner, name = place
        return _SITES.setdefault(key_of(owner, name), _Attribute(owner, name))
    target = resolve(patch.target)
    # Other packages use their function too, so it is not swapped in place.
    function = None if target.is_foreign else function_in(target.raw)
    key = key_of(target.owner, target.name) if function is None else id(function)
    if key not in _SITES and function is not None:
        _SITES[key] = _Function(function, target.text, target.is_bound)
    elif key not in _SITES:
        _SITES[key] = _Attribute(target.owner, target.name, shared=not target.is_foreign, bound=target.is_bound)
    return _SITES[key]


def provided(text: str) -> Place | None:
    for site in _SITES.values():
        if isinstance(site, _Attribute) and any(
            isinstance(each.patch, Provide) and each.patch.target == text for each in site.swaps
        ):
            return site.owner, site.name
    return None


def function_in(raw: Any) -> FunctionType | None:
    inner = unwrap(raw)
    return inner if type(inner) is FunctionType else None


def original_of(raw: Any) -> Any:
    function = function_in(raw)
    site = _SITES.get(id(function)) if function is not None else None
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
    copy.__dict__.update(function.__dict__)
    return copy


@functools.cache
def _calling_code(like: CodeType, takes_more: bool) -> CodeType:
    """Code with the signature of `like` that calls the wrapper in keyword default `_SLOT`.

    takes_more: it accepts further keywords, for overrides with more than the target.
    """
    flags, names = like.co_flags, list(like.co_varnames)
    positional, keyword = names[: like.co_argcount], names[like.co_argcount :][: like.co_kwonlyargcount]
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
