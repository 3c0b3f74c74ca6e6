"""Selects a device by name: published figures or a local calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import calibrated, devices
from .published import PublishedDevice
from .step_time import Pricer
from .training import ArgumentError


def pricer_of(name: str, calibration: Path | None, ranks: int = 1, node: int = 0) -> tuple[Pricer, str]:
    """Pricer and kind (cpu, cuda or npu). Raises ArgumentError.

    Args:
        name: of the table, or `here` for the `mindspeed-lite calibrate` file.
        ranks: processes per node, where they affect rates.
        node: devices of a node, 0 for the device's own.
    """
    if name == "here":
        if calibration is None or not calibration.is_file():
            raise ArgumentError(
                f"--device here: there is no file {calibration}: run `mindspeed-lite calibrate` on this machine first"
            )
        found = calibrated.read(calibration, ranks)
        return Pricer(found, found.overlap), found.kind
    full, figures = devices.named(name)
    figures = replace(figures, node=node or figures.node)
    return Pricer(PublishedDevice(full, figures), figures.overlap), figures.kind
