"""Messages of experts' dispatch and combine, issued and waited for apart: what features for each dispatcher share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.parallel.expert.exchange import Messages

from . import moe

ALLTOALL, ALLGATHER = "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"


class MessageState:
    """The messages of a session, and whether those issued now are the dispatch's, the combine's or others'."""

    def __init__(self) -> None:
        self.messages = Messages()
        self.is_dispatch: bool | None = None


def state_of(session: Session, feature: str, factory: Callable[[], Any] = MessageState) -> Any:
    """What the feature keeps: a MessageState, or what `factory` makes of it."""
    found = session.find(feature)
    if found is None:
        found = session.state(feature, factory)
        # Weight gradients belong to a backward pass that has been.
        session.on_end(found.messages.run_jobs)
    return found


def put(session: Session, job: Callable[[], None]) -> bool:
    """Let `job`, whose result no gradient waits for, run beside the next message; False if none is to come."""
    states = (session.find(name) for name in (ALLTOALL, ALLGATHER))
    return any(each.messages.put(job) for each in states if each is not None)


def expect_jobs(session: Session) -> None:
    """Say that the backward pass of what runs now will `put` jobs."""
    for name in (ALLTOALL, ALLGATHER):
        state = session.find(name)
        if state is not None:
            state.messages.expect_jobs()


def run_jobs(session: Session) -> None:
    """Run what was put and has found no message yet."""
    for name in (ALLTOALL, ALLGATHER):
        state = session.find(name)
        if state is not None:
            state.messages.run_jobs()


def during(feature: str, is_dispatch: bool) -> Callable[[Callable[..., Any], Session], Callable[..., Any]]:
    """Makes what goes around `token_dispatch` or `token_combine`: what they issue are its messages."""

    def make(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def exchange(self: Any, *args: Any, **kwargs: Any) -> Any:
            state = state_of(session, feature)
            state.is_dispatch = is_dispatch
            state.messages.begin(is_dispatch)
            try:
                return wrapped(self, *args, **kwargs)
            finally:
                state.is_dispatch = None

        return exchange

    return make


def before_gradients_are_reduced(feature: str) -> Around:
    """Computes what has found no message to run beside."""
    return moe.before_gradients_are_reduced(lambda session: state_of(session, feature).messages.run_jobs())
