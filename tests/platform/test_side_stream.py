"""Jobs beside compute: their order, what waits for what, and how long what they read is kept."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_lite.platform import side_stream as module
from mindspeed_lite.platform.side_stream import MAX_IN_FLIGHT, DeviceStream, SideStream
from tests.harness.lanes import LateLane


def test_jobs_run_in_order_and_are_done_when_they_are_joined() -> None:
    lane = LateLane(0.01)
    side, ran = SideStream(lane), []
    for number in range(6):
        side.submit(functools.partial(ran.append, number))
        assert len(side) <= MAX_IN_FLIGHT
    side.wait_all()
    assert ran == [*range(6)] and len(side) == 0 and not lane.faults
    side.wait_all()


def test_what_a_job_reads_is_kept_until_it_is_waited_for_and_no_longer() -> None:
    side, total = SideStream(LateLane(0.01)), torch.zeros(4)
    read = []

    def put(number: int) -> None:
        tensor = torch.full((4,), float(number))
        read.append(weakref.ref(tensor))
        side.submit(lambda: total.add_(tensor))

    for number in range(MAX_IN_FLIGHT + 1):
        put(number)
    gc.collect()
    assert [each() is not None for each in read] == [False] + [True] * MAX_IN_FLIGHT
    side.wait_all()
    gc.collect()
    assert not any(each() is not None for each in read)
    assert torch.equal(total, torch.full((4,), float(sum(range(MAX_IN_FLIGHT + 1)))))


class Recorder:
    """A device's module that writes down who waits for which event, and on which stream work is issued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events = 0
        self.streams = {"compute": self._stream("compute")}
        self._current = "compute"

    def Stream(self, device: Any) -> Any:
        return self._stream("side")

    def current_stream(self, device: Any) -> Any:
        return self.streams[self._current]

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    def synchronize(self, device: Any) -> None:
        self.log.append("synchronize")

    def work(self, name: str) -> None:
        self.log.append(f"{name} on {self._current}")

    def _stream(self, name: str) -> Any:
        def record() -> int:
            self.events += 1
            self.log.append(f"event {self.events} of {name}")
            return self.events

        return types.SimpleNamespace(
            name=name, record_event=record, wait_event=lambda event: self.log.append(f"{name} waits for {event}")
        )


def test_a_stream_waits_for_what_was_computed_and_compute_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder()
    device.streams["side"] = device._stream("side")
    monkeypatch.setattr(module.torch, "get_device_module", lambda _: device)
    lane = DeviceStream(torch.device("cuda"))
    side = SideStream(lane)
    device.work("dx")
    side.submit(lambda: device.work("dw"))
    device.work("activation")
    side.wait_all()
    device.work("reduction")
    lane.synchronize()
    assert device.log == [
        "dx on compute",
        "event 1 of compute",
        "side waits for 1",
        "dw on side",
        "event 2 of side",
        "activation on compute",
        "compute waits for 2",
        "reduction on compute",
        "synchronize",
    ]
