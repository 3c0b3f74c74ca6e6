"""Code before, after and around a method, whose arguments and result pass through."""

from __future__ import annotations

import contextlib

import pytest

from mindspeed_lite.patches._shared.wrappers import after, before, within


class Owner:
    def __init__(self) -> None:
        self.events: list[str] = []

    def method(self, x: int, *, y: int = 0) -> int:
        self.events.append("method")
        if x < 0:
            raise ValueError(x)
        return x + y


def note(session: str, owner: Owner) -> None:
    owner.events.append(session)


@contextlib.contextmanager
def noted(session: str, owner: Owner):
    note(session, owner)
    try:
        yield
    finally:
        owner.events.append("end")


@pytest.mark.parametrize(
    "wrapper, events, failed",
    [
        (before(note), ["s", "method"], ["s", "method"]),
        (after(note), ["method", "s"], ["method"]),
        (within(noted), ["s", "method", "end"], ["s", "method", "end"]),
    ],
)
def test_a_call_and_one_that_raises(wrapper, events, failed):
    call = wrapper(Owner.method, "s")
    owner = Owner()
    assert call(owner, 1, y=2) == 3 and owner.events == events
    owner = Owner()
    with pytest.raises(ValueError):
        call(owner, -1)
    assert owner.events == failed
