"""The self-test of every operator against float64."""

from __future__ import annotations

import functools

from benchmarks.gpu.units import Figures, Unit
from mindspeed_lite import platform
from mindspeed_lite.bench.selftest import FAILED, Check, numerics


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """A unit for each check."""
    platform.activate(device)
    checks = numerics.checks(device, quick=tiny)
    return [Unit(check.name, functools.partial(_run, check)) for check in (checks[:40] if tiny else checks)]


def _run(check: Check) -> Figures:
    outcome = check.run()
    found: Figures = {"status": outcome.status, "text": outcome.text}
    return found | ({"failed": outcome.text} if outcome.status == FAILED else {})
