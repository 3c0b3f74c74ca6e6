"""The queue of delayed weight gradients: order, hooks, and what is left after an error."""

from __future__ import annotations

import copy

import pytest

from mindspeed_lite.pipeline.wgrad import WgradQueue


def test_the_oldest_is_computed_first_and_all_are_announced_when_they_are_there() -> None:
    said: list[str] = []
    queue = WgradQueue()
    queue.call_when_done(lambda: said.append("hook"))
    for name in ("first", "second", "third"):
        queue.put(lambda name=name: said.append(name))
    assert len(queue) == 3 and said == []
    assert queue.drain() == 3 and len(queue) == 0
    assert said == ["first", "second", "third", "hook"]
    assert queue.drain() == 0 and said.count("hook") == 1


def test_a_gradient_that_fails_is_not_announced() -> None:
    said: list[str] = []
    queue = WgradQueue()
    queue.call_when_done(lambda: said.append("hook"))

    def fail() -> None:
        raise RuntimeError("no memory")

    queue.put(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        queue.drain()
    assert said == []


def test_a_layer_with_a_queue_can_be_copied() -> None:
    queue = WgradQueue()
    other = copy.deepcopy(queue)
    other.put(lambda: None)
    assert len(queue) == 0 and len(other) == 1
