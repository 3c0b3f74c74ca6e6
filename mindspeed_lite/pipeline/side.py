"""Work that nobody waits for, beside the rest of a backward pass: on a stream of its own until its results are wanted.

The backward pass of an expert layer is a chain: each step waits for the one before it, save the gradients of weights,
which nobody wants until gradients are reduced. On a stream of their own these products run beside what comes next in
the chain, such as the backward passes of activation, permutation, router and norm, which read and write memory where
products multiply. Nothing here waits on the host: every order is one of streams, kept by marks. `StreamLane` is the
lane of CUDA and NPU; whatever has its methods can stand in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Passed to a lane and never looked into: an event of a stream, or what a lane has instead.
Mark = Any
Job = Callable[[], None]
# What jobs read stays in memory until they are waited for: of how many jobs, at most.
MOST = 2


class Lane(Protocol):
    """Runs jobs in order, beside compute."""

    def start(self, job: Job) -> Mark:
        """Run `job` when the compute that was issued before is done; the mark says when the job is."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let the compute that is issued after this begin when the job of the mark is done."""
        ...

    def settle(self) -> None:
        """Wait, on the host, until everything that was issued is done."""
        ...


class StreamLane:
    """A lane that is a stream of the device.

    Args:
        device: "cuda" or "npu", with an index or without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def start(self, job: Job) -> Mark:
        self._stream.wait_event(self._compute().record_event())
        with self._module.stream(self._stream):
            job()
        return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        self._compute().wait_event(mark)

    def settle(self) -> None:
        self._module.synchronize(self._device)

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)


class Side:
    """The jobs of a lane that have not been waited for.

    A job must hold on to the tensors it reads: it is kept until it is waited for, since their memory is compute's to
    use again as soon as nobody holds them.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._running: deque[tuple[Job, Mark]] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def put(self, job: Job) -> None:
        """Run `job` beside the compute that is issued after this, behind the jobs that were put before."""
        while len(self._running) >= MOST:
            self._wait_for_oldest()
        self._running.append((job, self._lane.start(job)))

    def join(self) -> None:
        """Let the compute that is issued after this begin when all jobs are done."""
        while self._running:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, mark = self._running.popleft()
        self._lane.wait(mark)
