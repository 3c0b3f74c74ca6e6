"""Whose messages those of a dispatcher are, and which of two features takes a job."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared import expert_messages as shared


def session_of(feature):
    return Session(Settings({}), Context(Settings({}), "cpu", {}, {}), Report({}, "cpu")).of(feature)


def test_a_job_goes_to_the_feature_whose_message_is_to_come():
    session, ran = session_of(shared.ALLTOALL), []
    assert not shared.put(session, lambda: ran.append("none"))
    first = shared.state_of(session, shared.ALLTOALL)
    second = shared.state_of(session.of(shared.ALLGATHER), shared.ALLGATHER)
    assert first is shared.state_of(session, shared.ALLTOALL) and first is not second
    assert not shared.put(session, lambda: ran.append("none"))
    second.messages.takes_jobs = True
    assert shared.put(session, lambda: ran.append("second"))
    first.messages.run_jobs()
    assert ran == []
    second.messages.run_jobs()
    assert ran == ["second"]


def test_messages_are_those_of_the_call_that_issues_them():
    session = session_of(shared.ALLTOALL)
    state = shared.state_of(session, shared.ALLTOALL)

    def token_dispatch(self, error=None):
        assert self == "dispatcher" and state.is_dispatch is True
        if error:
            raise error
        return "tokens"

    exchange = shared.track_exchange(shared.ALLTOALL, True)(token_dispatch, session)
    assert exchange("dispatcher") == "tokens" and state.is_dispatch is None
    with pytest.raises(ValueError, match="lost"):
        exchange("dispatcher", error=ValueError("lost"))
    assert state.is_dispatch is None


def test_what_found_no_message_is_computed_before_gradients_are_reduced():
    session, ran = session_of(shared.ALLTOALL), []
    shared.state_of(session, shared.ALLTOALL).messages.put(lambda: ran.append("a gradient"), is_certain=True)
    start = shared.before_gradients_are_reduced(shared.ALLTOALL).make(lambda self: ran.append("reduced"), session)
    start(None)
    assert ran == ["a gradient", "reduced"]
