"""A rank's time in a step on a device, which waits for the host that starts operators, and for messages."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict

from mindspeed_lite.planner.published import PublishedDevice

_PASSING = ("torch.", "mindspeed_lite.dryrun.")
# Host time of a view, of an operator's: as timed with autograd on a CPU, with a launch of 5 us.
_VIEW = 0.5


class Clock:
    """Seconds by pass and by what takes them. Messages between pipeline stages take none: schedules wait for them."""

    def __init__(self, device: PublishedDevice) -> None:
        self.device = device
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._host = self._now = 0.0
        # When the messages of a group have arrived.
        self._free: dict[tuple[int, ...], float] = {}

    def view(self) -> None:
        """The host makes a view, which launches nothing."""
        self._host += self.device.figures.launch * _VIEW

    def operator(self, during: str, name: str, seconds: float) -> None:
        # The host starts the optimizer's operators for many parameters at once.
        self._host = self._now if during == "optimizer" else self._host + self.device.figures.launch
        self._reach(during, "host", self._host)
        self._reach(during, name, self._now + seconds)

    def read_by_host(self) -> None:
        """The host waits for a value, unless a kernel of this package reads it, as only those of a CPU do."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSING):
            frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith("mindspeed_lite.ops."):
            self._host = max(self._host, self._now)

    def message(self, during: str, name: str, group: tuple[int, ...], seconds: float, is_async: bool) -> float:
        """When it has arrived; what overlaps with computation slows it."""
        end = self._free[group] = max(self._now, self._free.get(group, 0.0)) + seconds
        self._reach(during, name, self._now + seconds * (1 - self.device.figures.overlap) if is_async else end)
        return end

    def wait(self, during: str, name: str, end: float) -> None:
        self._reach(during, name, end)

    def copy(self) -> Clock:
        found = copy.copy(self)
        found.seconds, found._free = self.seconds.copy(), self._free.copy()
        return found

    def repeat(self, began: Clock, ended: Clock) -> None:
        """Let pass again what passed from one copy to the other."""
        for key, seconds in ended.seconds.items():
            self.seconds[key] += seconds - began.seconds[key]
        self._now += ended._now - began._now
        self._host += ended._host - began._host
        for group, end in ended._free.items():
            self._free[group] = max(self._free.get(group, 0.0), self._now + end - ended._now)

    def _reach(self, during: str, name: str, then: float) -> None:
        if then > self._now:
            self.seconds[during, name] += then - self._now
            self._now = then
