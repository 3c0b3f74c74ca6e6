"""The machine: versions, what nvidia-smi says, and the two ceilings."""

from __future__ import annotations

import subprocess
from dataclasses import asdict

import torch

from benchmarks.gpu.units import Figures, SkippedError, Unit
from mindspeed_lite import platform
from mindspeed_lite.bench import ceiling, environment

_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """Versions, nvidia-smi and ceilings."""

    def versions() -> Figures:
        return environment.describe(platform.choose(device))

    def ceilings() -> Figures:
        return asdict(ceiling.measure(device, torch.bfloat16))

    return [Unit("versions", versions), Unit("nvidia-smi", _nvidia_smi), Unit("ceilings", ceilings)]


def _nvidia_smi() -> Figures:
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except OSError as error:
        raise SkippedError(f"nvidia-smi: {error.strerror}") from error
    first = next(iter(asked.stdout.splitlines()), "")
    return dict(zip(_QUERY.split(","), (each.strip() for each in first.split(",")), strict=False))
