"""Streams and events of the CPU: one order of execution, and messages that travel beside it (`lanes`)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        self._entered = stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.__exit__(*exc)


class ExternalStream(Stream):
    """A stream made elsewhere."""


DEFAULT_STREAM = Stream()
_NO_LANE = lanes.Lane()


class _Current(threading.local):
    """The stream of this thread, the mode in which its operators queue, and how many dispatch modes there are then."""

    stream: Stream = DEFAULT_STREAM
    queueing: lanes.Queueing | None = None
    modes = 0


_current = _Current()


def current_stream(device: Any = None) -> Stream:
    return _current.stream


def default_stream(device: Any = None) -> Stream:
    return DEFAULT_STREAM


def set_stream(stream: Any) -> None:
    """Nothing: what a stream that is set, and not entered, would run is run where it is issued, and waited for."""


def queueing_lane() -> lanes.Lane | None:
    """The lane that operators join which are issued now; None where they run at once."""
    here = _current.queueing is not None and torch._C._len_torch_dispatch_stack() == _current.modes
    return _current.stream.lane if here else None


def current_lane() -> lanes.Lane | None:
    """Where a collective stays that is issued now; None where it is waited for.

    That is in the default stream, where another mode has been entered since, which what queues would stand below, and
    for the first message of a stream: until there is one, operators are not looked at, and compiled code, which no
    mode sees into, runs compiled.
    """
    now = _current.stream
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


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Issue work on `stream`: collectives stay in its lane, and so do operators that read what they bring."""
    if not isinstance(stream, Stream) or stream is _current.stream:
        yield
        return
    before, outer = vars(_current).copy(), _current.queueing
    if outer is not None:
        outer.is_current = False
    queueing = lanes.Queueing(stream.lane) if stream.carries else None
    try:
        with contextlib.nullcontext() if queueing is None else queueing:
            _current.stream, _current.queueing = stream, queueing
            _current.modes = torch._C._len_torch_dispatch_stack()
            yield
    finally:
        vars(_current).clear()
        vars(_current).update(before)
        if outer is not None:
            outer.is_current = True


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
        looked_at = stream is not _current.stream or queueing_lane() is not None
    if looked_at:
        stream.lane.follow(mark)
    else:
        mark.lane.finish(mark.issued)


def _lane_of(stream: Any) -> lanes.Lane:
    """The lane of a stream; an empty one of what is no stream of this device."""
    return stream.lane if isinstance(stream, Stream) else _NO_LANE
