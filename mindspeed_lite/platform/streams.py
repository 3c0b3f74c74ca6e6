"""Streams and events of a device that runs everything in program order: the CPU's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class Event:
    """A point in program order; `elapsed_time` is wall-clock milliseconds, as on a GPU."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before elapsed_time is asked for")
        return (end_event._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        return None

    def synchronize(self) -> None:
        return None


class Stream:
    """A stream whose work is complete as soon as it is issued."""

    device_index = 0
    stream_id = 0
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_event(self, event: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Event:
        recorded: Event = Event() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class ExternalStream(Stream):
    """A stream made elsewhere."""


DEFAULT_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return DEFAULT_STREAM


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Issue work on `stream`: there is one order of execution, so nothing changes."""
    yield
