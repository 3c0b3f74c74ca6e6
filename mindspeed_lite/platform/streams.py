"""CPU streams and events: work runs immediately, events record wall-clock time."""

from __future__ import annotations

import threading
import time
from typing import Any


class Event:
    """A CUDA event whose work is always finished."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events."""
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before elapsed_time is asked for")
        return (end_event._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """A CUDA stream without pending work."""

    device_index = 0
    stream_id = 0
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        recorded: Event = Event() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        _thread.entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.entered.pop()


DEFAULT_STREAM = Stream()


class _Thread(threading.local):
    """Streams that a thread has entered; the last is current."""

    def __init__(self) -> None:
        self.entered: list[Any] = [DEFAULT_STREAM]


_thread = _Thread()


def current_stream(device: Any = None) -> Any:
    return _thread.entered[-1]


def default_stream(device: Any = None) -> Stream:
    return DEFAULT_STREAM


def set_stream(stream: Any) -> None:
    _thread.entered[-1] = stream


class StreamContext:
    """Reentrant context that makes `stream` current; None keeps it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _thread.entered.append(current_stream() if self.stream is None else self.stream)

    def __exit__(self, *exc: object) -> None:
        _thread.entered.pop()
