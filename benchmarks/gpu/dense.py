"""One dense training that the GPU bounds: off, Liger-Kernel's patch, on."""

from __future__ import annotations

from benchmarks.configurations import CONFIGURATIONS
from benchmarks.gpu.training import LIGER, OFF, ON, training_units
from benchmarks.gpu.units import Unit


def units(device: str, tiny: bool) -> list[Unit]:
    """Two runs of each. Liger's kernels are Triton's, which need a GPU."""
    configuration = CONFIGURATIONS["tiny" if tiny else "gpu"][0]
    return training_units(configuration, (OFF, LIGER, ON), device, tiny)
