"""Runs jobs, such as weight-gradient GEMMs, on a side stream, concurrent with the backward pass.

Nothing here blocks the host: events order the streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Event = Any
Job = Callable[[], object]
# Jobs keep their inputs alive until they are waited for.
MAX_IN_FLIGHT = 2


class DeviceStream:
    """A side stream of a CUDA device or NPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def run(self, job: Job, after: Event | None = None) -> Event:
        """Issue `job` on the stream, after the compute issued so far and after the event `after`."""
        self._stream.wait_event(self._compute().record_event())
        if after is not None:
            self._stream.wait_event(after)
        with self._module.stream(self._stream):
            job()
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        """Let compute issued from now on wait for the event."""
        self._compute().wait_event(event)

    def synchronize(self) -> None:
        """Block the host until all work is done."""
        self._module.synchronize(self._device)

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)


class SideStream:
    """Submits jobs to an executor and keeps at most `MAX_IN_FLIGHT` that compute has not waited for.

    A job must reference the tensors it reads, whose memory compute could reuse otherwise.
    """

    def __init__(self, executor: DeviceStream) -> None:
        self._executor = executor
        self._running: deque[tuple[Job, Event]] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, job: Job) -> None:
        """Run `job` after earlier jobs, concurrently with compute issued from now on."""
        while len(self._running) >= MAX_IN_FLIGHT:
            self._wait_for_oldest()
        self._running.append((job, self._executor.run(job)))

    def wait_all(self) -> None:
        """Let compute issued from now on wait for all jobs."""
        while self._running:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, event = self._running.popleft()
        self._executor.wait(event)
