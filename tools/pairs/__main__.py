"""`python -m tools.pairs`: rows of features, a layout and options, trained off and on; findings with their command.

A row is `LAYOUT,OPTION...:FEATURE...`. Each is three steps of a tiny GPT through examples/pretrain_gpt.py: without the
features, with those that round in another way, and with all of them. The first two agree within rounding, the last two
to the bit. Rows are drawn so that pairs not trained yet come first; what the features' own conditions refuse is left
out. Exit status: 0 without a finding, 1 with one, 2 where nothing was trained.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.training import Trainer
from tools.pairs.draw import Drawn, smallest
from tools.pairs.rows import TOKENS, Row, name_of
from tools.pairs.train import Bench, Verdict


class Search:
    """Draws and trains until the time is over; prints findings with their commands."""

    def __init__(self, bench: Bench, drawn: Drawn, shrinks: bool, verbose: bool) -> None:
        self.bench, self.drawn, self.shrinks, self.verbose = bench, drawn, shrinks, verbose
        self.rows = self.findings = 0
        self.untrained: dict[str, str] = {}

    def go_on(self, end: float, rows: int) -> None:
        while self.rows < rows and time.monotonic() < end:
            self.try_row(self.drawn.row())

    def try_row(self, row: Row) -> None:
        """Judge a row; print a failure once, for the smallest row that fails alike."""
        before, verdict = time.monotonic(), self.bench.judge(row)
        self.rows += 1
        if self.verbose:
            print(f"{time.monotonic() - before:5.1f} s {row} {verdict.kind}", flush=True)
        if not verdict.kind:
            self.drawn.note(row, verdict.applied)
            return
        small = smallest(row, lambda other: _is_same(self.bench.judge(other), verdict)) if self.shrinks else row
        text = self.bench.judge(small).text
        if verdict.kind == "off" and small == Row("single"):
            sys.exit(f"pairs: Megatron alone does not train: {text}")
        # One feature alone that a training refuses although its conditions hold is as bad as a crash; a variant's value
        # may be at fault.
        alone = {*small.features} - {*small.always}
        is_alone = len(alone) == 1 and "=" not in "".join(alone)
        if verdict.kind == "off" or (verdict.kind == "refused" and self.shrinks and not is_alone):
            self.drawn.known.append(small.tokens - {"single"})
            self.untrained[str(small)] = f"({verdict.kind}): {text}"
            return
        self.findings += 1
        # Other variants would be told again.
        self.drawn.known.append(frozenset(map(name_of, small.tokens)) - {"single"})
        print(f"FINDING {verdict.kind}: {text}", flush=True)
        if small != row:
            print(f"  drawn: {row}", flush=True)
        command = ["python", "-m", "tools.pairs", "--row", str(small)]
        command += ["--plant", self.bench.plant] if self.bench.plant else []
        print(f"  again: {shlex.join(command)}\n", flush=True)


def _is_same(one: Verdict, other: Verdict) -> bool:
    """Whether two rows fail alike: numbers differ, and the same error is raised."""
    texts = [re.sub(r" [\[(].*|\d[\d.]*", "", each.text) for each in (one, other)]
    return one.kind == other.kind and (one.kind == "differs" or texts[0] == texts[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pairs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="draw rows for so long")
    parser.add_argument("--rows", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--seed", type=int, help="repeats a run; printed by each")
    parser.add_argument("--row", action="append", default=[], metavar="ROW", help="this one, as a finding prints it")
    parser.add_argument("--plant", default="", help="module:function that is called first in every rank; for tests")
    parser.add_argument("--verbose", action="store_true", help="print every row with its time")
    given = parser.parse_args(arguments)
    try:
        rows = [Row.of(text) for text in given.row]
    except ValueError as error:
        parser.error(f"--row: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(None, Path(scratch), training=True)
        bench = Bench(trainer, given.plant)
        search = Search(bench, Drawn(seed, bench), not rows, given.verbose)
        try:
            for row in rows:
                search.try_row(row)
            if not rows:
                print(f"pairs: seed {seed}, megatron-core {bench.version}", flush=True)
                search.go_on(time.monotonic() + given.seconds, given.rows)
        finally:
            # Also of what is interrupted.
            tell(search, bool(rows))
            trainer.close()
    return 1 if search.findings else 0 if search.drawn.trained else 2


def tell(search: Search, is_given: bool) -> None:
    pairs = [pair for pair in search.drawn.trained if len(pair) == 2]
    never = sorted({*TOKENS.values()} - {name for pair in pairs for name in pair})
    for row, text in search.untrained.items():
        print(f"not trained: {row} {text}")
    if never and not is_given:
        print(f"in no row: {', '.join(never)}")
    counted = f"{search.rows} rows, {search.bench.trained} trainings, {len(pairs)} pairs"
    print(f"pairs: {counted}, {search.findings} findings", flush=True)


if __name__ == "__main__":
    sys.exit(main())
