"""Threads in the place of a device's streams: copies as fast as a bandwidth allows, and jobs that run late."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_lite.memory.copy_engine import Buffer, as_bytes

Job = Callable[[], None]


@dataclass
class Done:
    """A copy: whether it has been made."""

    event: threading.Event = field(default_factory=threading.Event)


class Lanes:
    """Two threads, which sleep as long as a copy would take at `bandwidth` bytes a second and then make it.

    `waited` is how long compute stood still for copies, in seconds; `moved` how many bytes went out and back; `faults`
    how often memory that was to be copied had been freed already.
    """

    def __init__(self, bandwidth: float = float("inf"), fail_at: int | None = None) -> None:
        self.bandwidth = bandwidth
        self.waited = 0.0
        self.moved = {"out": 0, "back": 0}
        self.faults = 0
        self.allocated: list[int] = []
        self._fail_at = fail_at
        self._queues: dict[str, queue.SimpleQueue[tuple[Callable[[], None], Done]]] = {}
        for lane in self.moved:
            self._queues[lane] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._queues[lane],), daemon=True).start()

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self._fail_at is not None and len(self.allocated) >= self._fail_at:
            raise RuntimeError("no more pinned memory")
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def d2h(self, source: torch.Tensor, buffer: Buffer) -> Done:
        # As a stream, it does not keep alive what it reads: freed too early, it would read another's memory.
        size, storage = source.numel(), StorageWeakRef(source.untyped_storage())

        def copy() -> None:
            held = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if held is None:
                self.faults += 1
            elif held.nbytes() >= size:
                buffer.write(as_bytes(held)[:size])

        return self._submit("out", size, buffer, copy)

    def h2d(self, buffer: Buffer, target: torch.Tensor) -> Done:
        # Whoever reads it before it has come reads this.
        target.fill_(0xCD)
        return self._submit("back", target.numel(), buffer, lambda: buffer.read(target))

    def wait(self, mark: Done) -> None:
        before = time.perf_counter()
        assert mark.event.wait(60), "a copy never came to its end"
        self.waited += time.perf_counter() - before

    def _submit(self, lane: str, nbytes: int, buffer: Buffer, copy: Callable[[], Any]) -> Done:
        def issue(after: list[Done]) -> Done:
            def job() -> None:
                for earlier in after:
                    earlier.event.wait()
                time.sleep(nbytes / self.bandwidth)
                copy()

            done = Done()
            self._queues[lane].put((job, done))
            return done

        self.moved[lane] += nbytes
        return buffer.copied_by(issue)

    @staticmethod
    def _work(jobs: queue.SimpleQueue[tuple[Callable[[], None], Done]]) -> None:
        while True:
            job, done = jobs.get()
            job()
            # A stream holds on to nothing that it has copied.
            del job
            done.event.set()


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

    def run(self, job: Job) -> threading.Event:
        done = self._last = threading.Event()
        self._queue.put((weakref.ref(job), done))
        return done

    def wait(self, event: Any) -> None:
        assert event.wait(60), "a job never came to its end"

    def synchronize(self) -> None:
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
