"""Interface of a device."""

from __future__ import annotations

from typing import Protocol

from .redirect import Redirects


class DeviceError(RuntimeError):
    """The requested device cannot be used; the text says why and what to do."""


class Device(Protocol):
    """A device kind, implemented by modules `cpu`, `cuda` and `npu`."""

    name: str
    distributed_backend: str

    def available(self) -> list[str]: ...

    def describe(self) -> str: ...

    def install(self, redirects: Redirects) -> None: ...
