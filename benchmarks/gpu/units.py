"""Runs the units of a part in this process and writes a line of JSON when each begins and ends.

    python -m benchmarks.gpu.units MODULE PART --device cuda --lines FILE [--tiny] [--share 0/4] [--done NAME ...]

A killed or crashed process leaves the lines of the units that it finished.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Figures = dict[str, Any]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SkippedError(Exception):
    """The unit cannot be measured here; the text says why."""


class Unit(NamedTuple):
    """One thing to measure; `run()` returns its figures."""

    name: str
    run: Callable[[], Figures]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the units of this share that are not done."""
    _end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.units")
    parser.add_argument("module")
    parser.add_argument("part")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--lines", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--done", nargs="*", default=[])
    options = parser.parse_args(arguments)
    from mindspeed_lite.bench.output import finite

    with open(options.lines, "a", encoding="utf-8") as file:

        def tell(**entry: Any) -> None:
            file.write(json.dumps(finite(entry), allow_nan=False) + "\n")
            file.flush()

        listed = importlib.import_module(options.module).units(options.part, options.device, options.tiny)
        number, count = map(int, options.share.split("/"))
        for unit in listed[number::count]:
            if unit.name not in options.done:
                _run(unit, tell)
    return 0


def _end_with_parent() -> None:
    """A campaign that is killed leaves no measurement running beside the next call's."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run(unit: Unit, tell: Callable[..., None]) -> None:
    began = time.monotonic()

    def write(state: str, figures: Figures, reason: str = "") -> None:
        seconds = round(time.monotonic() - began, 2)
        tell(unit=unit.name, state=state, reason=reason, seconds=seconds, figures=figures)

    write("running", {})
    try:
        figures = unit.run()
        state = "failed" if figures.get("failed") else "ok"
        write(state, figures, str(figures.get("failed") or ""))
    except SkippedError as error:
        write("skipped", {}, str(error))
    except Exception as error:  # whatever it is, the page names it and the next unit runs
        write("failed", {}, " ".join(f"{type(error).__name__}: {error}".split())[:400])


if __name__ == "__main__":
    # This file as the module that the parts import: `SkippedError` is one class.
    from benchmarks.gpu import units

    sys.exit(units.main())
