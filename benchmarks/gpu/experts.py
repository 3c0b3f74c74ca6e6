"""One training of a mixture of experts: off, on."""

from __future__ import annotations

from benchmarks.configurations import CONFIGURATIONS
from benchmarks.gpu.training import OFF, ON, training_units
from benchmarks.gpu.units import Unit


def units(device: str, tiny: bool) -> list[Unit]:
    """Two runs of each."""
    return training_units(CONFIGURATIONS["tiny" if tiny else "gpu"][1], (OFF, ON), device, tiny)
