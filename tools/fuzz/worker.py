"""One process of a run: draws calls for some seconds in its environment, and writes down what it finds.

Before a call it writes the call into a file, so that the run knows what a process was at that has ended or hangs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

import hypothesis
import torch

from mindspeed_lite.ops.discovery import OPERATORS
from tools.fuzz.call import Call, kind
from tools.fuzz.draws import calls
from tools.fuzz.environments import NO_MKLDNN
from tools.fuzz.judge import finding

# A finding is made smaller for so long.
_SHRINK_SECONDS = 10.0
_CALLS_A_ROUND = 40


class _Found(Exception):
    """A call is wrong."""


class Worker:
    """Draws from `seed` on until `seconds` are over, or `calls` made; each kind of finding is told once."""

    def __init__(
        self, seed: int, seconds: float, calls: int, journal: Path, only: tuple[str, ...], known: set[str]
    ) -> None:
        self.seed, self.calls, self.end = seed, calls, time.monotonic() + seconds
        self.journal, self.only, self.known = journal, only, known
        self.tried = 0
        self._smallest: tuple[Call, str] | None = None
        self._shrink_end = 0.0

    def run(self) -> None:
        number = 0
        while not self._is_over():
            self._smallest = None
            with _nothing_but_findings():
                self._round(self.seed + number)
            if self._smallest is not None:
                call, text = self._smallest
                self.known.add(kind(call, text))
                print(json.dumps({"call": call.json(), "text": text}), flush=True)
            number += 1
        print(json.dumps({"tried": self.tried}), flush=True)

    def _round(self, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            database=None,
            deadline=None,
            max_examples=_CALLS_A_ROUND,
            report_multiple_bugs=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(calls(max(2, os.cpu_count() or 1), self.only))
        def attempt(call: Call) -> None:
            if time.monotonic() > self._shrink_end if self._smallest else self._is_over():
                return
            text = self.finding(call)
            if text and kind(call, text) not in self.known:
                if self._smallest is None:
                    self._shrink_end = time.monotonic() + _SHRINK_SECONDS
                self._smallest = call, text
                raise _Found

        attempt()

    def _is_over(self) -> bool:
        return time.monotonic() > self.end or self.tried >= self.calls

    def finding(self, call: Call) -> str:
        self.tried += 1
        self.journal.write_text(call.json(), encoding="utf-8")
        return finding(call)


class _nothing_but_findings:
    """A finding that could not be made smaller in time looks like chance to hypothesis."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, (_Found, hypothesis.errors.Flaky))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--environment")
    parser.add_argument("--only", default="")
    parser.add_argument("--known", default="[]")
    parser.add_argument("--call")
    parser.add_argument("--plant", default="")
    given = parser.parse_args(arguments)
    if given.environment == NO_MKLDNN:
        torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    if given.plant:
        module, _, name = given.plant.partition(":")
        getattr(importlib.import_module(module), name)()
    only = tuple(given.only.split(",")) if given.only else tuple(OPERATORS)
    worker = Worker(given.seed, given.seconds, given.calls, given.journal, only, set(json.loads(given.known)))
    if given.call is None:
        worker.run()
        return
    call = Call.of(given.call)
    text = worker.finding(call)
    if text:
        print(json.dumps({"call": call.json(), "text": text}), flush=True)
    print(json.dumps({"tried": 1}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
