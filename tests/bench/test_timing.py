"""Timing with a clock that only contenders move: ratios, rounds, samples."""

import gc

import pytest
import torch

from mindspeed_lite.bench import timing
from mindspeed_lite.bench.timing import Effort, Sample, Timing


class Clock:
    """Time that passes only where a contender says so."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now

    def takes(self, name, seconds):
        def contender():
            self.order.append(name)
            self.now += seconds

        return contender


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing, "_clock", found)
    return found


def test_contenders_take_turns_and_twice_as_long_is_a_ratio_of_two(clock):
    contenders = {"a": clock.takes("a", 0.5), "b": clock.takes("b", 1.0)}
    found, errors = timing.time_interleaved(contenders, Effort(sample_seconds=0.1, rounds=(3, 3), warmup=0))
    assert not errors and (found["a"].seconds, found["a"].low, found["a"].high) == pytest.approx((0.5, 0.5, 0.5))
    assert found["b"].over(found["a"]) == pytest.approx((2, 2, 2))
    assert clock.order == ["a", "b"] + ["a", "b"] * 3  # one each to find the number of calls


def test_a_sample_is_long_enough_and_time_is_per_call(clock):
    effort = Effort(sample_seconds=0.05, rounds=(2, 2), warmup=0)
    found, _ = timing.time_interleaved({"a": clock.takes("a", 0.001)}, effort)
    assert found["a"].seconds == pytest.approx(0.001) and len(clock.order) >= 100


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 6), (10.0, 3)])
def test_rounds_end_with_the_time_but_not_before_the_least(clock, seconds, rounds):
    effort = Effort(sample_seconds=0.1, rounds=(3, 100), seconds=6.0)
    found, _ = timing.time_interleaved({"a": clock.takes("a", seconds)}, effort)
    assert len(found["a"].samples) == rounds


def test_what_slows_a_whole_round_down_does_not_blur_the_ratio():
    a, b = (Timing.of([Sample(each, 0.0) for each in seconds]) for seconds in ([1.0, 5.0, 9.0], [2.0, 10.0, 18.0]))
    assert b.over(a) == pytest.approx((2, 2, 2)) and (a.seconds, a.low, a.high) == pytest.approx((5.0, 1.8, 8.2))


def test_a_contender_that_fails_late_drops_out_and_the_others_go_on(clock):
    calls = []

    def fails_at_the_third():
        calls.append(1)
        clock.now += 1.0
        if len(calls) > 2:
            raise RuntimeError("out of\nmemory")

    contenders = {"a": clock.takes("a", 1.0), "b": fails_at_the_third}
    found, errors = timing.time_interleaved(contenders, Effort(sample_seconds=0.1, rounds=(3, 3), warmup=0))
    assert errors == {"b": "RuntimeError: out of memory"} and len(found["a"].samples) == 3 and "b" not in found


def test_no_garbage_is_collected_within_a_sample():
    seen = []
    timing.time_interleaved({"a": lambda: seen.append(gc.isenabled())}, Effort(0.0, rounds=(3, 3)))
    assert seen[-1] is False and gc.isenabled()


class Device:
    """A device's module: a call takes 2 ms there; `waits`: the calls have synchronized."""

    def __init__(self, waits=False):
        self.log, self.waits = [], waits

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = sum(entry == "call" for entry in device.log)

            def query(self):
                return device.waits

            def elapsed_time(self, end):
                return 2.0 * (end.at - self.at)

        return Event()

    def synchronize(self):
        self.log.append("synchronize")

    def _sleep(self, cycles):
        self.log.append("spin")


@pytest.mark.parametrize("waits", [False, True])
def test_a_devices_time_is_that_of_its_events(monkeypatch, waits):
    device = Device(waits)
    monkeypatch.setattr(torch, "npu", device, raising=False)
    effort = Effort(sample_seconds=10.0, rounds=(3, 3), warmup=0)
    found, errors = timing.time_interleaved({"a": lambda: device.log.append("call")}, effort, "npu")
    assert not errors and found["a"].device == found["a"].seconds == pytest.approx(2e-3) and found["a"].host < 2e-3
    # Queued behind a kernel that spins, and no more calls than the queue holds.
    assert device.log[-18:] == ["spin", *["call"] * 16, "synchronize"]
    assert all(each.waits == waits for each in found["a"].samples)
