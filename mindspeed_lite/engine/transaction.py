"""Puts a plan in place, all of it or none, and takes it back by identity, sparing what others did since."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from .errors import ApplyError, EngineError, UndoError
from .feature import Provide, Wrap
from .plan import ALREADY_THERE, Plan, Step
from .target import (
    MISSING,
    Owner,
    Place,
    Target,
    describe,
    holders,
    is_class,
    namespace,
    parse,
    read,
    resolve,
    rewrap,
    signature_difference,
    top_level,
    unwrap,
    vacancy,
    write,
)

# Host attributes belong to the process, so who put what there last is known per process too.
_LOCK = threading.RLock()
_ACTIVE: list[Transaction] = []


@dataclass(frozen=True, eq=False)
class Record:
    """One attribute that was written, with all it takes to write it back."""

    owner: Owner
    name: str
    had_own_attribute: bool
    raw_before: Any
    raw_after: Any


@dataclass(eq=False)
class Move:
    """An object and what its holders get instead; `name` is what most of them call it.

    `native`: the package itself holds what is put there, so a holder of it need not have meant the target.
    """

    before: Any
    after: Any
    name: str
    native: bool = False


@dataclass
class _Chain:
    """All steps on one object: what stands there, and what is to stand there once every step had its say.

    Where an earlier session put the object, its places fall in two families that must not be mixed: those the
    session moved, and the object's `homes`, which held it before.
    """

    target: Target
    shared: bool
    homes: set[tuple[int, str]] | None
    steps: list[Step] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def concerns(self, place: Place) -> bool:
        """Whether a further holder of the object is to be moved along."""
        named = _key(self.target.owner, self.target.name)
        key = _key(*place)
        alike = self.homes is None or (key in self.homes) == (named in self.homes)
        return self.shared and key != named and alike


class Transaction:
    """A plan and the journal of putting it in place; may be applied again after it was undone."""

    def __init__(self, plan: Plan, session: Any) -> None:
        self.plan = plan
        self.session = session
        self.journal: list[Record] = []
        self._packages = {top_level(step.patch.target) for step in plan.steps}
        self._moves: list[Move] = []
        # Who held a replacement before anything moved is its home or its author, and keeps it.
        self._homes: dict[tuple[int, str], Owner] = {}
        self._reports: dict[int, tuple[str, list[str]]] = {}

    @property
    def active(self) -> bool:
        return self in _ACTIVE

    def placed(self, step: Step) -> tuple[str, list[str]]:
        """How far a step is verified, and which further holders of its target were moved along."""
        return self._reports.get(id(step), (step.verified, []))

    def apply(self) -> None:
        """Put every step in place. If one fails, take all back and raise ApplyError."""
        with _LOCK:
            if self.active:
                raise ApplyError("this transaction is applied already; undo it before applying it again.")
            try:
                self._apply()
            except BaseException:
                self._restore()
                raise
            _ACTIVE.append(self)

    def undo(self) -> list[str]:
        """Take every step back; returns what was left alone because someone else has changed it since."""
        with _LOCK:
            if not self.active:
                return []
            places = {_key(each.owner, each.name) for each in self.journal}
            for later in _ACTIVE[_ACTIVE.index(self) + 1 :]:
                for record in later.journal:
                    if _key(record.owner, record.name) in places:
                        raise UndoError(
                            f"`{describe(record.owner, record.name)}` was patched again by a later session; "
                            "undo sessions in reverse order, the latest first."
                        )
            _ACTIVE.remove(self)
            return self._restore()

    def _apply(self) -> None:
        self._reports.clear()
        moves = []
        for step in self.plan.steps:
            if isinstance(step.patch, Provide):
                with _blame(step):
                    moves += self._provide(step, step.patch)
        chains = self._chains()
        for chain in chains:
            self._compose(chain)
            moves += [each for each in chain.moves if callable(each.after) or isinstance(each.after, property)]
        shared = [move.before for chain in chains if chain.shared for move in chain.moves]
        spots = self._scan(shared + [move.after for move in moves])
        written = {_key(record.owner, record.name) for record in self.journal}
        for move in moves:
            for owner, name in spots[id(move.after)]:
                if _key(owner, name) not in written:
                    self._homes[_key(owner, name)] = owner
                    move.native |= top_level(describe(owner, name)) in self._packages
        # Only with the homes known may holders of a replacement be taken for late importers.
        self._moves = moves
        for chain in chains:
            with _blame(chain.steps[0]):
                self._place(chain, spots)

    def _provide(self, step: Step, patch: Provide) -> list[Move]:
        place = vacancy(patch.target)
        if place is None:
            self._reports[id(step)] = (ALREADY_THERE, [])
            return []
        value = patch.value(self.session)
        owner, name = place
        before = read(owner, name)
        if isinstance(value, ModuleType) and value.__spec__ is None and not parse(patch.target)[1]:
            # find_spec raises for a loaded module without one.
            value.__spec__ = ModuleSpec(name, None)
        self._write(owner, name, value)
        parent, _, child = name.rpartition(".")
        if owner is sys.modules and parent in owner and read(owner[parent], child) is MISSING:
            self._write(owner[parent], child, value)
        return [Move(before, value, child)] if callable(value) or isinstance(value, ModuleType) else []

    def _chains(self) -> list[_Chain]:
        placed = {id(move.after) for other in _ACTIVE for move in other._moves}
        taken = {key for other in _ACTIVE for key in other._homes}
        chains: dict[Any, _Chain] = {}
        for step in self.plan.steps:
            if step.target is None:
                continue
            with _blame(step):
                target = resolve(step.target.text)
            named = _key(target.owner, target.name)
            homes = taken if id(target.raw) in placed else None
            # What an earlier session put there has its home in a patch, yet stands for the host's own object.
            shared = target.is_shared or homes is not None
            key = (id(target.raw), homes is not None and named in homes) if shared else named
            chains.setdefault(key, _Chain(target, shared, homes)).steps.append(step)
        return list(chains.values())

    def _compose(self, chain: _Chain) -> None:
        raw = chain.target.raw
        like, current = raw, unwrap(raw)
        for step in chain.steps:
            with _blame(step):
                if isinstance(step.patch, Wrap):
                    current = _wrapped(step.patch, chain.target, current, self.session)
                else:
                    like = rewrap(like, step.value)
                    current = unwrap(like)
        after = rewrap(like, current)
        if after is raw:
            return
        name = chain.target.name
        chain.moves = [Move(raw, after, name)]
        if isinstance(raw, staticmethod):  # by-value holders have the function inside
            chain.moves.append(Move(raw.__func__, unwrap(after), name))

    def _place(self, chain: _Chain, spots: dict[int, list[Place]]) -> None:
        for move in chain.moves:
            if move.before is chain.target.raw:
                self._write(chain.target.owner, chain.target.name, move.after)
            others = [place for place in spots.get(id(move.before), ()) if chain.concerns(place)]
            for owner, name in others:
                self._write(owner, name, move.after)
            for step in chain.steps:
                known = self._reports.setdefault(id(step), (step.verified, []))[1]
                known += sorted(describe(*place) for place in others)

    def _write(self, owner: Owner, name: str, after: Any) -> None:
        before = read(owner, name)
        write(owner, name, after)
        self.journal.append(Record(owner, name, before is not MISSING, before, after))

    def _restore(self) -> list[str]:
        left = []
        for record in reversed(self.journal):
            if read(record.owner, record.name) is record.raw_after:
                write(record.owner, record.name, record.raw_before)
            else:
                left.append(f"`{describe(record.owner, record.name)}` was changed by someone else and stays so")
        left += self._restore_late_importers({_key(record.owner, record.name) for record in self.journal})
        self.journal.clear()
        self._moves.clear()
        self._homes.clear()
        return left

    def _restore_late_importers(self, journalled: set[tuple[int, str]]) -> list[str]:
        """Modules that imported a replacement by value after it was put in place hold it under no record."""
        left = []
        for identity, places in self._scan([move.after for move in self._moves]).items():
            moves = [move for move in self._moves if id(move.after) == identity]
            for owner, name in places:
                named = [move for move in moves if move.name == name]
                native = moves[0].native and not named
                if native or _key(owner, name) in self._homes or _key(owner, name) in journalled:
                    continue
                # One replacement may serve two targets; then the name tells which of them was imported.
                named = named if len(moves) > 1 else moves
                if len(named) == 1 and named[0].before is not MISSING:
                    write(owner, name, named[0].before)
                else:
                    left.append(f"`{describe(owner, name)}` keeps its copy, for nothing stood there before")
        return left

    def _scan(self, objects: list[Any]) -> dict[int, list[Place]]:
        if not objects:
            return {}
        return holders(objects, skip=self.plan.skip_modules, packages=self._packages)


def _wrapped(patch: Wrap, target: Target, current: Any, session: Any) -> Any:
    new = patch.around(current, session)
    if new is current:
        return new
    if not callable(new):
        raise TypeError(f"`around` returned {new!r}, which cannot be called")
    if isinstance(new, FunctionType):
        different = signature_difference(current, new, bound=target.is_bound, wrapper=True)
        if different:
            raise TypeError(f"the wrapper cannot stand in for the target: {'; '.join(different)}")
        if "<locals>" in new.__qualname__:  # any other is somebody's own and keeps its name
            functools.update_wrapper(new, current, updated=() if isinstance(current, type) else ("__dict__",))
    elif isinstance(new, type) and isinstance(current, type) and "<locals>" in new.__qualname__:
        # Pickle finds a class by name, and under the target's name it is the new one that stands there.
        new.__module__, new.__qualname__, new.__name__ = (
            current.__module__,
            current.__qualname__,
            current.__name__,
        )
    return new


def _key(owner: Owner, name: str) -> tuple[int, str]:
    # A class's dictionary is a new proxy at each look; a module's may serve under two names in sys.modules.
    return id(owner if is_class(owner) else namespace(owner)), name


@contextmanager
def _blame(step: Step) -> Iterator[None]:
    try:
        yield
    except ApplyError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
        raise ApplyError(
            f"feature `{step.feature}` could not {step.patch.how} `{step.patch.target}` ({kind}{error}); "
            "nothing has been changed, turn the feature off to go on."
        ) from error
