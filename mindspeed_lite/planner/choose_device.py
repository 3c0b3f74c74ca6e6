"""Selects a device by name: published figures or a local calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import calibrated, devices
from .links import Links
from .published import PublishedDevice
from .step_time import Pricer
from .training import ArgumentError


def pricer_of(
    name: str, calibration: Path | None, ranks: int = 1, node: int = 0, links: Links | None = None
) -> tuple[Pricer, str]:
    """Pricer and kind (cpu, cuda or npu). Raises ArgumentError.

    Args:
        name: of the table, or `here` for the `mindspeed-lite calibrate` file.
        ranks: processes per node, where they affect rates.
        node: devices of a node, 0 for the device's own.
        links: measured ones, of a device of the table.
    """
    if name == "here":
        if links is not None:
            raise ArgumentError("--links is of no use with --device here, which has measured collectives: leave it out")
        if calibration is None or not calibration.is_file():
            raise ArgumentError(
                f"--device here: there is no file {calibration}: run `mindspeed-lite calibrate` on this machine first"
            )
        found = calibrated.read(calibration, ranks)
        return Pricer(found, found.overlap), found.kind
    full, figures = devices.named(name)
    figures = replace(figures, node=node or (links.ranks_per_host if links else figures.node))
    return Pricer(PublishedDevice(full, figures, links), figures.overlap), figures.kind
