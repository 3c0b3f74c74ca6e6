"""A lane of the CPU for tests: jobs run late, in a thread, and nothing but their owner keeps them."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], None]


class LateLane:
    """Runs jobs in order, each up to `delay` seconds after it could have begun.

    `ran` counts jobs, `faults` those that nobody held any more, whose memory a device would have given to others. While
    `gate` is not set, none is run.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.ran = 0
        self.faults = 0
        self.gate = threading.Event()
        self.gate.set()
        self._delays = random.Random(1)
        self._delay = delay
        self._queue: queue.SimpleQueue[tuple[weakref.ref[Job], threading.Event]] = queue.SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        threading.Thread(target=self._work, daemon=True).start()

    def start(self, job: Job) -> threading.Event:
        done = self._last = threading.Event()
        self._queue.put((weakref.ref(job), done))
        return done

    def wait(self, mark: Any) -> None:
        assert mark.wait(60), "a job never came to its end"

    def settle(self) -> None:
        self.wait(self._last)

    def _work(self) -> None:
        while True:
            owned, done = self._queue.get()
            self.gate.wait()
            time.sleep(self._delays.uniform(0, self._delay))
            job = owned()
            if job is None:
                self.faults += 1
            else:
                job()
                self.ran += 1
            # A stream holds on to nothing that it has run.
            del job
            done.set()
