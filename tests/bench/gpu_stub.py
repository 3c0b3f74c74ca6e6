"""Units of the campaign's tests: what a unit does is its name; the folder in $STUB counts its runs."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

from benchmarks.gpu.units import Figures, SkippedError, Unit


def _run(name: str) -> Figures:
    with Path(os.environ["STUB"], "runs").open("a") as file:
        file.write(name + "\n")
    what = name.partition(" ")[0]
    if what == "sleeps":
        time.sleep(float(name.split()[1]))
    elif what == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "raises":
        raise ValueError("out of luck")
    elif what == "skips":
        raise SkippedError("not here")
    elif what == "finds":
        return {"failed": "it is wrong"}
    return {"name": name}


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """Those in $UNITS, one a line."""
    names = os.environ["UNITS"].splitlines()
    return [Unit(name, functools.partial(_run, name)) for name in names]
