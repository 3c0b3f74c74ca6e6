"""Timing with a clock that only contenders move: ratios, rounds, samples, intervals."""

import gc

import pytest
import torch

from mindspeed_lite.bench import timing


class Clock:
    """Time that passes only where a contender says so."""

    def __init__(self):
        self.now, self.order, self.jitter = 0.0, [], 0.0

    def __call__(self):
        return self.now

    def takes(self, name, seconds):
        def contender():
            self.order.append(name)
            self.now += seconds + self.jitter

        return contender


def raced(seconds, effort, clock=None):
    clock = clock or Clock()
    return timing.time_interleaved(
        {name: clock.takes(name, each) for name, each in seconds.items()}, effort, clock=clock
    ), clock


def test_twice_as_long_is_a_ratio_of_two():
    (found, errors), _ = raced({"a": 0.5, "b": 1.0}, timing.Effort(sample_seconds=0.1, rounds=(7, 7)))
    assert not errors and found["a"].seconds == pytest.approx(0.5) and found["a"].low == pytest.approx(0.5)
    ratio = timing.ratio(found["b"], found["a"])
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_contenders_take_turns():
    _, clock = raced({"a": 1.0, "b": 1.0}, timing.Effort(sample_seconds=0.1, rounds=(3, 3), warmup=0))
    assert clock.order == ["a", "b"] + ["a", "b"] * 3  # one each to find the number of calls


def test_a_sample_is_long_enough_and_time_is_per_call():
    (found, _), clock = raced({"a": 0.001}, timing.Effort(sample_seconds=0.05, rounds=(2, 2), warmup=0))
    assert found["a"].seconds == pytest.approx(0.001)
    assert len(clock.order) >= 100


def test_rounds_end_with_the_time_but_not_before_the_least():
    (found, _), _ = raced({"a": 1.0}, timing.Effort(sample_seconds=0.1, rounds=(3, 100), seconds=6.0))
    assert len(found["a"].samples) == 6
    (found, _), _ = raced({"a": 10.0}, timing.Effort(sample_seconds=0.1, rounds=(3, 100), seconds=6.0))
    assert len(found["a"].samples) == 3


def test_what_slows_a_whole_round_down_does_not_blur_the_ratio():
    a, b = [1.0, 5.0, 1.0, 9.0, 1.0, 2.0, 7.0], [2.0, 10.0, 2.0, 18.0, 2.0, 4.0, 14.0]
    ratio = timing.ratio(*(timing.timing([timing.Sample(each, 0.0, False) for each in one]) for one in (b, a)))
    assert (ratio.ratio, ratio.low, ratio.high) == (2, 2, 2)


@pytest.mark.parametrize(("count", "skip"), [(1, 0), (2, 0), (5, 0), (6, 0), (9, 1), (15, 3), (20, 5), (40, 13)])
def test_the_interval_is_that_of_the_sign_test(count, skip):
    """Known ranks of the 95 % interval for a median."""
    assert timing._outside(count) == skip


def test_quantiles():
    assert timing.quantile([1.0, 2.0, 3.0], 0.5) == 2.0 and timing.quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert timing.quantile([4.0], 0.9) == 4.0


def test_a_contender_that_fails_late_drops_out_and_the_others_go_on():
    clock, calls = Clock(), []

    def fails_at_the_third():
        calls.append(1)
        clock.now += 1.0
        if len(calls) > 2:
            raise RuntimeError("out of\nmemory")

    found, errors = timing.time_interleaved(
        {"a": clock.takes("a", 1.0), "b": fails_at_the_third},
        timing.Effort(sample_seconds=0.1, rounds=(3, 3), warmup=0),
        clock=clock,
    )
    assert errors == {"b": "RuntimeError: out of memory"} and len(found["a"].samples) == 3 and "b" not in found


def test_no_garbage_is_collected_within_a_sample():
    seen = []
    timing.time_interleaved({"a": lambda: seen.append(gc.isenabled())}, timing.Effort(rounds=(3, 3)))
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
    effort = timing.Effort(sample_seconds=10.0, rounds=(3, 3), warmup=0)
    found, errors = timing.time_interleaved({"a": lambda: device.log.append("call")}, effort, "npu")
    assert not errors and found["a"].device == found["a"].seconds == pytest.approx(2e-3) and found["a"].host < 2e-3
    # Queued behind a kernel that spins, and no more calls than the queue holds.
    assert device.log[-18:] == ["spin", *["call"] * 16, "synchronize"]
    assert all(each.waits == waits for each in found["a"].samples)
