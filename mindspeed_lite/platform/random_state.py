"""Separate device and host random streams on one generator.

Megatron saves both and warns if device operations move the host's. torch's default generator is the device's; the
host's state is swapped in for its draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class HostRandom:
    """Host random state, initialised from the default generator."""

    def __init__(self) -> None:
        self._state: torch.Tensor = torch.default_generator.get_state()

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Make torch's default generator the host's within the block."""
        device_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = torch.default_generator.get_state()
            torch.default_generator.set_state(device_state)


class DeviceGenerators(tuple[torch.Generator, ...]):
    """`torch.cuda.default_generators` in which every index is the CPU generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator
