"""`mindspeed-lite calibrate`: times this machine for predictions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.platform import cache

from . import terminal
from .terminal import fail

PROGRAM = "mindspeed-lite calibrate"
MOST_SECONDS = 500.0

DESCRIPTION = """\
Times matrix products, attention, norms, other vector operators, optimizer steps and collectives on this machine's CPU
at several shapes, in about a minute on two cores, and writes a file that `mindspeed-lite plan --device here` reads.
Nothing else should run meanwhile."""


def default_file() -> Path | None:
    try:
        return cache.folder() / "calibration.json"
    except cache.NoCache:
        return None


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(list(arguments))
    file = Path(options.out) if options.out else default_file()
    if file is None:
        return fail(PROGRAM, "there is no folder for the file: name one with --out FILE")
    if problem := terminal.why_not_writable(str(file)):
        return fail(PROGRAM, f"--out {file}: {problem}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    ranks = min(2, cores) if options.processes is None else options.processes
    most = max(2, 4 * cores)
    if not 1 <= ranks <= most or not 0 < options.seconds <= MOST_SECONDS:
        return fail(
            PROGRAM,
            f"--processes is 1 to {most} on these {cores} cores, and --seconds above 0 and at most {MOST_SECONDS:g}",
        )
    from mindspeed_lite.bench import calibration

    try:
        found = calibration.measure(ranks, options.seconds)
    except calibration.CalibrationError as error:
        return fail(PROGRAM, error, 1)
    try:
        file.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        return fail(PROGRAM, f"{file}: {error.strerror or error}", 1)
    samples = sum(len(each) for each in found["operators"].values()) + len(found["collectives"])
    print(f"{samples} times on {found['device']}, {ranks} processes, in {found['seconds']} s: {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog=PROGRAM, description=DESCRIPTION)
    parser.add_argument("--out", metavar="FILE", help="the file (default: calibration.json in the cache's folder)")
    parser.add_argument("--processes", type=int, metavar="N", help="how many at once (default: 2, or 1 on one core)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S",
        help="for how long calls of operators are repeated, about (default %(default)g)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
