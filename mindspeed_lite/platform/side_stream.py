"""Runs jobs, such as weight-gradient GEMMs, on a side stream, concurrent with the backward pass.

The backward pass of an expert layer is a chain: each step waits for the one before it, except the gradients of
weights, which nothing reads until gradients are reduced. On a stream of their own these GEMMs run beside what comes
next in the chain, such as the backward passes of activation, permutation, router and norm, which read and write memory
where GEMMs multiply. Nothing here blocks the host: every order is one of streams, kept by events. `DeviceStream` is the
stream of CUDA and NPU; any object with the methods of `StreamExecutor` can take its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Passed back and never looked into: an event of a stream, or what an executor has instead.
Event = Any
Job = Callable[[], object]
# What jobs read stays in memory until they are waited for, so only so many may be in flight.
MAX_IN_FLIGHT = 2


class StreamExecutor(Protocol):
    """Runs jobs in order, beside compute."""

    def run(self, job: Job) -> Event:
        """Run `job` when the compute that was issued before is done; the event says when the job is."""
        ...

    def wait(self, event: Event) -> None:
        """Let the compute that is issued after this begin when the job of the event is done."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything that was issued is done."""
        ...


class DeviceStream:
    """A stream of a CUDA device or NPU beside its compute stream.

    Args:
        device: "cuda" or "npu", with an index or without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def run(self, job: Job, after: Event | None = None) -> Event:
        """Issue the work of `job` on the stream, behind the compute issued so far and behind `after`."""
        self._stream.wait_event(self._compute().record_event())
        if after is not None:
            self._stream.wait_event(after)
        with self._module.stream(self._stream):
            job()
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        self._compute().wait_event(event)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)


class SideStream:
    """Submits jobs to an executor and keeps those that compute has not waited for.

    A job must hold on to the tensors it reads: it is kept until it is waited for, since their memory is compute's to
    use again as soon as no reference is left.
    """

    def __init__(self, executor: StreamExecutor) -> None:
        self._executor = executor
        self._running: deque[tuple[Job, Event]] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, job: Job) -> None:
        """Run `job` beside the compute that is issued after this, behind the jobs that were submitted before."""
        while len(self._running) >= MAX_IN_FLIGHT:
            self._wait_for_oldest()
        self._running.append((job, self._executor.run(job)))

    def wait_all(self) -> None:
        """Let the compute that is issued after this begin when all jobs are done."""
        while self._running:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, event = self._running.popleft()
        self._executor.wait(event)
