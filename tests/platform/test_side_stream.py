"""Jobs beside compute: their order, what waits for what, and how long what they read is kept."""

from __future__ import annotations

import functools
import gc
import weakref
from unittest import mock

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


def test_a_stream_waits_for_what_was_computed_and_compute_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = mock.MagicMock()
    monkeypatch.setattr(module.torch, "get_device_module", lambda _: device)
    lane = DeviceStream(torch.device("cuda"))
    side = SideStream(lane)
    device.work("dx")
    side.submit(lambda: device.work("dw"))
    device.work("activation")
    side.wait_all()
    device.work("reduction")
    lane.synchronize()
    computed = device.current_stream.return_value.record_event.return_value
    done = device.Stream.return_value.record_event.return_value
    calls = [(name, args) for name, args, _ in device.mock_calls if name not in ("current_stream", "Stream", "stream")]
    assert calls == [
        ("work", ("dx",)),
        ("current_stream().record_event", ()),
        ("Stream().wait_event", (computed,)),
        ("stream().__enter__", ()),
        ("work", ("dw",)),
        ("stream().__exit__", (None, None, None)),
        ("Stream().record_event", ()),
        ("work", ("activation",)),
        ("current_stream().wait_event", (done,)),
        ("work", ("reduction",)),
        ("synchronize", (torch.device("cuda"),)),
    ]
