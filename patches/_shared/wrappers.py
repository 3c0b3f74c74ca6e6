"""Wrappers for `Around` patches of methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Function, Session

Make = Callable[[Function, Session], Function]


def before(act: Callable[[Session, Any], object]) -> Make:
    """Call `act(session, self)` before the method."""

    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            act(session, self)
            return wrapped(self, *args, **kwargs)

        return method

    return make


def after(act: Callable[[Session, Any], object]) -> Make:
    """Call `act(session, self)` after the method."""

    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = wrapped(self, *args, **kwargs)
            act(session, self)
            return found

        return method

    return make


def within(context: Callable[[Session, Any], contextlib.AbstractContextManager[Any]]) -> Make:
    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with context(session, self):
                return wrapped(self, *args, **kwargs)

        return method

    return make
