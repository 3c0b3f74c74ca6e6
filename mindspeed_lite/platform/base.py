"""What the rest of mindspeed_lite asks of a device."""

from __future__ import annotations

from typing import Protocol

from .redirect import Redirects


class DeviceError(RuntimeError):
    """The requested device cannot be used; the text says why and what to do."""


class Device(Protocol):
    """One device kind; `cpu`, `cuda` and `npu` are modules of this shape."""

    name: str
    distributed_backend: str

    def available(self) -> list[str]:
        """All reasons why this device cannot be used here; empty means it can."""
        ...

    def describe(self) -> str:
        """One line for people: which hardware this is."""
        ...

    def install(self, redirects: Redirects) -> None:
        """Make `torch.cuda` mean this device, reversibly where the device allows it."""
        ...
