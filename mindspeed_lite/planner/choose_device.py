"""The device of a prediction by its name: one of the table of published figures, or what was measured here."""

from __future__ import annotations

from pathlib import Path

from . import calibrated, devices
from .published import PublishedDevice
from .step_time import Pricer
from .training import ArgumentError


def pricer_of(name: str, calibration: Path | None, ranks: int = 1) -> tuple[Pricer, str]:
    """What prices a step on it, and its kind: cpu, cuda or npu.

    Args:
        name: of the table, or `here` for the file of `mindspeed-lite calibrate`.
        ranks: how many processes a node runs, where that changes what each of them reaches.
    Raises:
        ArgumentError: there is no such device or file.
    """
    if name == "here":
        if calibration is None or not calibration.is_file():
            raise ArgumentError(
                f"--device here: there is no file {calibration}: run `mindspeed-lite calibrate` on this machine first"
            )
        found = calibrated.read(calibration, ranks)
        return Pricer(found, found.overlap), found.kind
    try:
        full, figures = devices.named(name)
    except KeyError:
        known = ", ".join((*devices.FIGURES, "here"))
        raise ArgumentError(f"--device {name}: there is no such device: choose one of {known}") from None
    return Pricer(PublishedDevice(full, figures)), figures.kind
