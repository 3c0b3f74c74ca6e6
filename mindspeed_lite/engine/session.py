"""API for running patches: settings, state, fallback log."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import FallbackError
from .feature import Context, Settings
from .report import Fallback, Report
from .target import MISSING

_log = logging.getLogger("mindspeed_lite")
T = TypeVar("T")


class Session:
    """Active features, as seen by one of them.

    A view begins with its feature: `on_begin` callbacks act on objects of earlier views. It ends when its feature is
    disabled or its flags change: patches, `state` and `mark` are removed, then `on_end` callbacks run.

    Attributes:
        verifier: compares operators with originals; None without --mindspeed-lite-verify.
    """

    def __init__(self, settings: Settings, context: Context, report: Report, *, strict: bool = False) -> None:
        self.feature = ""
        self.settings = settings
        self.context = context
        self.report = report
        self.strict = strict
        self.verifier: Any = None
        self._kept: dict[str, Any] = {}
        self._begins: list[Callable[[], object]] | None = []
        self._ends: list[Callable[[], object]] = []
        # Shared by all views.
        self._views = [self]
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    def of(self, feature: str) -> Session:
        """A view for a feature, until `end`."""
        view = copy.copy(self)
        view.feature, view._kept, view._begins, view._ends = feature, {}, [], []
        self._views.append(view)
        return view

    def update(self, **values: Any) -> None:
        """Set attributes of all views."""
        for view in self._views:
            vars(view).update(values)

    def renew(self, settings: Settings, context: Context, report: Report, strict: bool) -> Callable[[], None]:
        """Continue with other features and the fallbacks so far; return the undo."""
        names = ("settings", "context", "report", "strict", "verifier", "_logged")
        before = {name: getattr(self, name) for name in names}
        report.fallbacks, report.verifications = self.report.fallbacks, self.report.verifications
        logged = {(feature, text) for feature, text in self._logged if feature}
        self.update(settings=settings, context=context, report=report, strict=strict, _logged=logged)
        return functools.partial(self.update, **before)

    def state(self, key: str, factory: Callable[[], T]) -> T:
        """This feature's object under `key`, made on first use; dropped at its end."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = factory()
            found: T = self._kept[key]
            return found

    def find(self, key: str) -> Any:
        """Object under `key` of the latest view that has one."""
        return next((view._kept[key] for view in reversed(self._views) if key in view._kept), None)

    def on_begin(self, callback: Callable[[], object]) -> None:
        """Call `callback` once this feature has begun and those that it replaces have ended; not later."""
        if self._begins is not None:
            self._begins.append(callback)

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

    def begin(self) -> list[str]:
        """Call what waits for the begin; return failures, one line each."""
        waiting, self._begins = self._begins or [], None
        return self._failures("applied to existing objects", waiting)

    def end(self) -> list[str]:
        """End this feature's view; return failures, one line each."""
        failed = []
        while self._ends:
            failed += self._failures("ended whole", [self._ends.pop()])
        self._kept = {}
        if self in self._views:
            self._views.remove(self)
        return failed

    def _failures(self, what: str, callbacks: list[Callable[[], object]]) -> list[str]:
        failed = []
        for callback in callbacks:
            try:
                callback()
            except Exception as error:
                failed.append(f"feature `{self.feature}` could not be {what}: {type(error).__name__}: {error}")
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
        owner = weakref.ref(self)

        def log(reason: str) -> None:
            view = owner()
            if view is not None:
                view.fallback(feature, reason)

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
        if (feature, text) in self._logged:
            return False
        with self._lock:
            before = len(self._logged)
            self._logged.add((feature, text))
            return len(self._logged) > before
