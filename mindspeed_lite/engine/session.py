"""API for running patches: settings, state, fallback log."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import FallbackError
from .feature import Context, Settings
from .report import Fallback, Report
from .target import MISSING

_log = logging.getLogger("mindspeed_lite")
T = TypeVar("T")


@dataclass(eq=False)
class _Shared:
    settings: Settings
    context: Context
    report: Report
    strict: bool
    verifier: Any = None
    states: dict[str, list[Any]] = field(default_factory=dict)
    logged: set[tuple[str, str]] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)


class Session:
    """Active features, as seen by one of them.

    A view ends when its feature is disabled or its flags change: patches, `state` and `mark` are removed, then `on_end`
    callbacks run.
    """

    def __init__(self, settings: Settings, context: Context, report: Report, *, strict: bool = False) -> None:
        self._see(_Shared(settings, context, report, strict), "")

    def _see(self, shared: _Shared, feature: str) -> Session:
        self.feature = feature
        self._shared = shared
        self._kept: dict[str, Any] = {}
        self._ends: list[Callable[[], object]] = []
        return self

    def of(self, feature: str) -> Session:
        return Session.__new__(Session)._see(self._shared, feature)

    def renew(self, settings: Settings, context: Context, report: Report, strict: bool) -> Callable[[], None]:
        """Continue with other features and the fallbacks so far; return the undo."""
        shared, before = self._shared, dict(vars(self._shared))
        report.fallbacks, report.verifications = shared.report.fallbacks, shared.report.verifications
        shared.logged = {(feature, text) for feature, text in shared.logged if feature}
        shared.settings, shared.context, shared.report, shared.strict = settings, context, report, strict
        return lambda: vars(shared).update(before)

    @property
    def settings(self) -> Settings:
        return self._shared.settings

    @property
    def context(self) -> Context:
        return self._shared.context

    @property
    def report(self) -> Report:
        return self._shared.report

    @property
    def strict(self) -> bool:
        return self._shared.strict

    @property
    def verifier(self) -> Any:
        """Compares operators with originals; None without --mindspeed-lite-verify."""
        return self._shared.verifier

    @verifier.setter
    def verifier(self, verifier: Any) -> None:
        self._shared.verifier = verifier

    def state(self, key: str, factory: Callable[[], T]) -> T:
        """This feature's object under `key`, made on first use; dropped at its end."""
        with self._shared.lock:
            if key not in self._kept:
                self._kept[key] = factory()
                self._shared.states.setdefault(key, []).append(self._kept[key])
            found: T = self._kept[key]
            return found

    def find(self, key: str) -> Any:
        return next(reversed(self._shared.states.get(key, ())), None)

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` when this feature has ended, latest first."""
        self._ends.append(callback)

    def mark(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a host object until this feature ends."""
        space = vars(owner)
        before = space.get(name, MISSING)
        reference = weakref.ref(owner)
        setattr(owner, name, value)

        def remove() -> None:
            found = reference()
            if found is not None and vars(found).get(name, MISSING) is value:
                if before is MISSING:
                    del vars(found)[name]
                else:
                    vars(found)[name] = before

        self.on_end(remove)

    def end(self) -> list[str]:
        """End this feature's view; return failures, one line each."""
        failed = []
        while self._ends:
            try:
                self._ends.pop()()
            except Exception as error:
                failed.append(f"feature `{self.feature}` could not be ended whole: {type(error).__name__}: {error}")
        while self._kept:
            key, value = self._kept.popitem()
            self._shared.states[key] = [each for each in self._shared.states[key] if each is not value]
        return failed

    def fallback(self, feature: str, reason: str, *, is_logged: bool = False) -> None:
        """Record a call left to the host's code; logged once per reason, an error if strict."""
        if self.verifier is not None and self.verifier.is_comparing:
            return
        if self._is_new(feature, reason):
            self.report.fallbacks.append(Fallback(feature, reason))
            level = logging.DEBUG if is_logged else logging.WARNING
            _log.log(level, "feature `%s` leaves a call to the host's own code: %s", feature, reason)
        if self.strict:
            raise FallbackError(f"feature `{feature}` fell back, which strict mode forbids: {reason}.")

    def fallback_of(self, feature: str) -> Callable[[str], None]:
        """`fallback` that does not keep the session alive and ignores calls after its end."""
        owner = weakref.ref(self._shared)

        def log(reason: str) -> None:
            shared = owner()
            if shared is not None:
                Session.__new__(Session)._see(shared, feature).fallback(feature, reason)

        return log

    def notice(self, text: str) -> None:
        if self._is_new("", text):
            self.report.notices.append(text)
            _log.debug("%s", text)

    def log_decision(self, text: str) -> None:
        """Report a decision made during training; rank 0 also logs it."""
        self.notice(text)
        if os.environ.get("RANK", "0") == "0":
            _log.warning("%s", text)

    def _is_new(self, feature: str, text: str) -> bool:
        if (feature, text) in self._shared.logged:
            return False
        with self._shared.lock:
            before = len(self._shared.logged)
            self._shared.logged.add((feature, text))
            return len(self._shared.logged) > before
