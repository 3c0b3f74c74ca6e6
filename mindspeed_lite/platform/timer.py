"""Host time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was issued."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, from an idle device until the device is idle again."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began
