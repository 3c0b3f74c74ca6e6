"""Asynchronous messages of expert dispatch and combine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.parallel.expert.exchange import Messages

from . import moe
from .wrappers import Make, within

ALLTOALL, ALLGATHER = "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"


class MessageState:
    """Messages of a session; is_dispatch: True in dispatch, False in combine, else None."""

    def __init__(self) -> None:
        self.messages = Messages()
        self.is_dispatch: bool | None = None


def state_of(session: Session, feature: str, factory: Callable[[], Any] = MessageState) -> Any:
    found = session.find(feature)
    if found is None:
        found = session.state(feature, factory)
        session.on_end(found.messages.run_jobs)
    return found


def put(session: Session, job: Callable[[], None]) -> bool:
    """Run `job`, on which no gradient depends, during the next message; False if none follows."""
    return any(each.messages.put(job) for each in _states(session))


def expect_jobs(session: Session) -> None:
    for each in _states(session):
        each.messages.expect_jobs()


def run_jobs(session: Session) -> None:
    """Run jobs that overlapped with no message."""
    for each in _states(session):
        each.messages.run_jobs()


def _states(session: Session) -> list[Any]:
    return [state for name in (ALLTOALL, ALLGATHER) if (state := session.find(name)) is not None]


def track_exchange(feature: str, is_dispatch: bool) -> Make:
    """Make collectives of `token_dispatch` or `token_combine` messages of this feature."""

    @contextlib.contextmanager
    def tracked(session: Session, _: Any) -> Iterator[None]:
        state = state_of(session, feature)
        state.is_dispatch = is_dispatch
        state.messages.begin(is_dispatch)
        try:
            yield
        finally:
            state.is_dispatch = None

    return within(tracked)


def before_gradients_are_reduced(feature: str) -> Around:
    return moe.before_gradients_are_reduced(lambda session: state_of(session, feature).messages.run_jobs())
