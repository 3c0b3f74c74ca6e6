"""Two random streams on one generator: the device's and the host's, as a GPU run has them.

Megatron keeps apart what the accelerator draws (weights, dropout) and what the host draws (data loading), saves
both in checkpoints and warns when a device operation moves the host's stream. On the CPU both would share torch's
default generator. Here the default generator is the device's, because device tensors are CPU tensors, and the
host's state is kept beside it and swapped in for the short moments in which the host draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class HostRandom:
    """The host's random state; created from the default generator, so that an unseeded run stays random."""

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
        """Within this block torch's default generator is the host's."""
        device_state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = torch.default_generator.get_state()
            torch.default_generator.set_state(device_state)


class DeviceGenerators:
    """Stands for `torch.cuda.default_generators`: every index is the one CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))
