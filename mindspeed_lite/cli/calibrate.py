"""Times matrix products, attention, norms, other vector operators, optimizer steps and collectives on this
machine's CPU at several shapes, in about a minute on two cores, and writes a file that
`mindspeed-lite plan --device here` reads. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from mindspeed_lite.platform import cache

from . import terminal
from .terminal import CommandError, Parser, bounded, option, output_file, say, writing


def default_file() -> Path | None:
    try:
        return cache.folder() / "calibration.json"
    except cache.NoCache:
        return None


def add_options(parser: Parser) -> None:
    cores = len(os.sched_getaffinity(0))
    option(parser, "--out FILE", "the file (default: calibration.json in the cache's folder)", output_file)
    option(parser, "--processes N", "how many at once", bounded(int, 1, max(2, 4 * cores)), min(2, cores))
    option(parser, "--seconds S", "for how long calls of operators are repeated, about",
           bounded(float, 0, 500, above=True), 30.0)  # fmt: skip


def main(options: argparse.Namespace) -> int:
    file = Path(options.out) if options.out else default_file()
    if file is None:
        raise CommandError("there is no folder for the file: name one with --out FILE")
    with terminal.progress("importing torch") as tell:
        from mindspeed_lite.bench import calibration

        try:
            found = calibration.measure(options.processes, options.seconds, tell)
        except calibration.CalibrationError as error:
            raise CommandError(error, 1) from error
    with writing("--out", str(file)):
        file.write_text(json.dumps(found, indent=1) + "\n")
    samples = sum(len(each) for each in found["operators"].values()) + len(found["collectives"])
    say(f"{samples} times on {found['device']}, {options.processes} processes, in {found['seconds']} s: {file}")
    return 0
