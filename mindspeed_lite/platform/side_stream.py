"""Runs jobs, such as weight-gradient GEMMs, on a side stream during the backward pass.

Events order the streams; the host never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

Event = Any
Job = Callable[[], object]
# Jobs keep their inputs alive until waited for.
MAX_IN_FLIGHT = 2


class DeviceStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def run(self, job: Job, after: Iterable[Event] = ()) -> Event:
        """Issue `job` after compute issued so far and the events `after`."""
        for event in (self._compute().record_event(), *after):
            self._stream.wait_event(event)
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
    """Submits jobs, at most `MAX_IN_FLIGHT` not yet waited for.

    A job must reference the tensors it reads, or compute could reuse their memory.
    """

    def __init__(self, executor: DeviceStream) -> None:
        self._executor = executor
        self._running: deque[tuple[Job, Event]] = deque()

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, job: Job) -> None:
        """Run `job` after earlier jobs, concurrently with later compute."""
        while len(self._running) >= MAX_IN_FLIGHT:
            self._wait_for_oldest()
        self._running.append((job, self._executor.run(job)))

    def wait_all(self) -> None:
        while self._running:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, event = self._running.popleft()
        self._executor.wait(event)
