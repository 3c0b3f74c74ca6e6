"""Streams and events of the CPU: one order of execution, and messages that travel beside it (`lanes`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import lanes


class Event:
    """A point in a stream; `elapsed_time` is wall-clock milliseconds, as on a GPU."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded: float | None = None
        self._mark: lanes.Mark | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()
        self._mark = _lane_of(current_stream() if stream is None else stream).mark()

    def elapsed_time(self, end_event: Event) -> float:
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before elapsed_time is asked for")
        return (end_event._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        return self._mark is None or self._mark.lane.is_done(self._mark.issued)

    def wait(self, stream: Any = None) -> None:
        """Let what the stream is given from here on begin behind what the event stands for."""
        _wait(current_stream() if stream is None else stream, self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.lane.finish(self._mark.issued)
            self._mark = None


class Stream:
    """An order of work, of which messages and what waits for them may be unfinished."""

    device_index = 0
    stream_id = 0
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority
        self.lane = lanes.Lane()
        # Whether a message has ever been issued in it, or been waited for by it.
        self.carries = False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        _wait(self, _lane_of(stream).mark())

    def record_event(self, event: Any = None) -> Event:
        recorded: Event = Event() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return not self.lane

    def synchronize(self) -> None:
        self.lane.finish()

    def __enter__(self) -> Stream:
        StreamContext(self).__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        StreamContext(self).__exit__(*exc)


class ExternalStream(Stream):
    """A stream made elsewhere."""


DEFAULT_STREAM = Stream()
_NO_LANE = lanes.Lane()


class _Entered(NamedTuple):
    """A stream, the mode in which its operators queue, and how many dispatch modes there are then."""

    stream: Stream
    queueing: lanes.Queueing | None = None
    modes: int = 0


class _Thread(threading.local):
    """The streams that a thread has entered and not left; the last is the current one."""

    def __init__(self) -> None:
        self.entered = [_Entered(DEFAULT_STREAM)]


_thread = _Thread()


def current_stream(device: Any = None) -> Stream:
    return _thread.entered[-1].stream


def default_stream(device: Any = None) -> Stream:
    return DEFAULT_STREAM


def set_stream(stream: Any) -> None:
    """Nothing: what a stream that is set, and not entered, would run is run where it is issued, and waited for."""


def queueing_lane() -> lanes.Lane | None:
    """The lane that operators join which are issued now; None where they run at once."""
    now = _thread.entered[-1]
    here = now.queueing is not None and torch._C._len_torch_dispatch_stack() == now.modes
    return now.stream.lane if here else None


def current_lane() -> lanes.Lane | None:
    """Where a collective stays that is issued now; None where it is waited for.

    That is in the default stream, where another mode has been entered since, which what queues would stand below, and
    for the first message of a stream: until there is one, operators are not looked at, and compiled code, which no
    mode sees into, runs compiled.
    """
    now = current_stream()
    if now is DEFAULT_STREAM:
        return None
    now.carries = True
    return queueing_lane()


def call_kernel(kernel: Callable[[], object], tensors: Sequence[torch.Tensor]) -> None:
    """Call what was handed the addresses of these tensors, behind what lanes have not finished of them."""
    lane = queueing_lane()
    if lane is not None and lane.last(tensors, writing=True):
        lane.put(kernel, writes=tensors)
    else:
        lanes.finish_for(tensors)
        kernel()


class StreamContext:
    """Issue work on `stream`: collectives stay in its lane, and so do operators that read what they bring.

    It can be entered again, within itself and in several threads too: what was entered is kept by thread.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        before = _thread.entered[-1]
        if not isinstance(self.stream, Stream) or self.stream is before.stream:
            _thread.entered.append(before)
            return
        queueing = lanes.Queueing(self.stream.lane) if self.stream.carries else None
        if queueing is not None:
            queueing.__enter__()  # type: ignore[no-untyped-call]
        if before.queueing is not None:
            before.queueing.is_current = False
        _thread.entered.append(_Entered(self.stream, queueing, torch._C._len_torch_dispatch_stack()))

    def __exit__(self, *exc: Any) -> None:
        left, now = _thread.entered.pop(), _thread.entered[-1]
        if left is now:
            return
        if now.queueing is not None:
            now.queueing.is_current = True
        if left.queueing is not None:
            left.queueing.__exit__(*exc)  # type: ignore[no-untyped-call]


def synchronize(device: Any = None) -> None:
    """Finish everything that streams have begun."""
    lanes.finish_all()


def _wait(stream: Any, mark: lanes.Mark | None) -> None:
    """Let `stream` wait for a mark: where its operators are looked at, those that read what is behind the mark."""
    if mark is None or mark.lane.is_done(mark.issued) or mark.lane is _lane_of(stream):
        return
    looked_at = isinstance(stream, Stream) and stream is not DEFAULT_STREAM
    if looked_at:
        stream.carries = True
        looked_at = stream is not current_stream() or queueing_lane() is not None
    if looked_at:
        stream.lane.follow(mark)
    else:
        mark.lane.finish(mark.issued)


def _lane_of(stream: Any) -> lanes.Lane:
    """The lane of a stream; an empty one of what is no stream of this device."""
    return stream.lane if isinstance(stream, Stream) else _NO_LANE
