"""What a running patch may ask for: the settings it is bound to, and a place to say that it stepped aside."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import FallbackError
from .feature import Context, Settings
from .report import Fallback, Report

if TYPE_CHECKING:
    from .transaction import Transaction

_log = logging.getLogger("mindspeed_lite")


class Session:
    """One set of settings in force. Two models with different settings are two sessions."""

    def __init__(self, settings: Settings, context: Context, report: Report, *, strict: bool = False) -> None:
        self.settings = settings
        self.context = context
        self.report = report
        self.strict = strict
        self.transaction: Transaction | None = None
        # Who compares replaced operators with the originals; set before patches are bound, or nobody does.
        self.verifier: Any = None
        # What objects that outlive the session need done before the patches go, latest first.
        self.at_end: list[Callable[[], None]] = []
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def fallback(self, feature: str, reason: str) -> None:
        """`feature` leaves this call to the host's own code; said once per reason, forbidden if strict."""
        if self._is_new(feature, reason):
            self.report.fallbacks.append(Fallback(feature, reason))
            _log.warning("feature `%s` leaves a call to the host's own code: %s", feature, reason)
        if self.strict:
            raise FallbackError(f"feature `{feature}` fell back, which strict mode forbids: {reason}.")

    def fallback_of(self, feature: str) -> Callable[[str], None]:
        """`fallback` of one feature, for what must not keep the session; silent once that has gone."""
        owner = weakref.ref(self)

        def say(reason: str) -> None:
            session = owner()
            if session is not None:
                session.fallback(feature, reason)

        return say

    def notice(self, text: str) -> None:
        """Something the user should know; said once."""
        if self._is_new("", text):
            self.report.notices.append(text)
            _log.debug("%s", text)

    def _is_new(self, feature: str, text: str) -> bool:
        if (feature, text) in self._said:
            return False
        with self._lock:
            before = len(self._said)
            self._said.add((feature, text))
            return len(self._said) > before
