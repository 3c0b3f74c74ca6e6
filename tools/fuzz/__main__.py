"""`python -m tools.fuzz`: workers in one environment after another; findings with the command that repeats each.

Exit status: 0 without a finding, 1 with one, 2 where nothing was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite.ops.discovery import OPERATORS
from tools.fuzz import environments
from tools.fuzz.call import Call, kind

# Importing PyTorch, and compiling kernels where none are kept; then the longest call.
_START_SECONDS, _HANG_SECONDS = 60.0, 180.0


class Run:
    """Prints what the workers find; `findings` counts it."""

    def __init__(self, seed: int, calls: int, only: str, plant: str) -> None:
        self.seed, self.calls, self.only, self.plant = seed, calls, only, plant
        self.findings = self.tried = 0

    def environment(self, name: str, seconds: float) -> None:
        """Try for so long in one environment; a worker that ends is replaced by another."""
        end, number, known = time.monotonic() + seconds, 0, set[str]()
        while number == 0 or end - time.monotonic() > 1.0:
            ended = self._worker(name, max(1.0, end - time.monotonic()), self.seed + 1_000_000 * number, known, None)
            if ended == 0 or self.calls < sys.maxsize:
                return
            number += 1

    def call(self, name: str, call: str) -> None:
        """One call again."""
        self._worker(name, 1.0, self.seed, set(), call)

    def _worker(self, name: str, seconds: float, seed: int, known: set[str], call: str | None) -> int:
        """The status that the worker ended with."""
        with tempfile.TemporaryDirectory() as folder, environments.variables(name) as variables:
            journal = Path(folder) / "call"
            command = [sys.executable, "-m", "tools.fuzz.worker", "--environment", name, "--journal", str(journal)]
            command += ["--seed", str(seed), "--seconds", str(seconds), "--calls", str(self.calls)]
            command += ["--only", self.only, "--plant", self.plant]
            command += ["--known", json.dumps(sorted(known))] + ([] if call is None else ["--call", call])
            output = Path(folder) / "errors"
            with output.open("w", encoding="utf-8") as errors:
                process = subprocess.Popen(
                    command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            try:
                said, _ = process.communicate(timeout=_START_SECONDS + seconds + _HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            for line in said.splitlines():
                found = json.loads(line)
                self.tried += found.get("tried", 0)
                if "call" in found:
                    known.add(kind(Call.of(found["call"]), found["text"]))
                    self._tell(name, found["call"], found["text"])
            if process.returncode:
                last = journal.read_text(encoding="utf-8") if journal.exists() else ""
                lines = output.read_text(encoding="utf-8").splitlines()
                words = [line for line in lines if "Error" in line and not line.startswith(" ")]
                ended = _ending(process.returncode)
                self._tell(name, last, f"the process {ended}{': ' + words[-1] if words else ''}")
            return process.returncode

    def _tell(self, name: str, call: str, text: str) -> None:
        self.findings += 1
        command = ["python", "-m", "tools.fuzz", "--environment", name]
        if not call:
            print(f"FINDING in environment {name!r}, before the first call: {text}\n", flush=True)
            return
        command += ["--call", call] + (["--plant", self.plant] if self.plant else [])
        print(f"FINDING {Call.of(call).operator}: {text}", flush=True)
        print(f"  environment: {name}\n  call: {call}\n  again: {shlex.join(command)}\n", flush=True)


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "hung and was ended"
    return f"ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    names = list(environments.environments())
    parser.add_argument("--seconds", type=float, default=60.0, help="for all environments together (60)")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="at most so many in each environment")
    parser.add_argument("--seed", type=int, help="repeats a run; printed by each")
    parser.add_argument("--environment", choices=names, help="this one instead of all")
    parser.add_argument("--only", default="", help=f"operators, with commas: {','.join(OPERATORS)}")
    parser.add_argument("--call", help="one call, as a finding prints it")
    parser.add_argument("--plant", default="", help="module:function that is called first in every worker; for tests")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    run = Run(seed, given.calls, given.only, given.plant)
    if given.call is not None:
        run.call(given.environment or names[0], given.call)
    else:
        chosen = [given.environment] if given.environment else names
        print(f"fuzz: seed {seed}, {given.seconds:g} s in {len(chosen)} environments: {', '.join(chosen)}", flush=True)
        end = time.monotonic() + given.seconds
        for place, name in enumerate(chosen):
            run.environment(name, max(0.0, end - time.monotonic()) / (len(chosen) - place))
    print(f"fuzz: {run.tried} calls, {run.findings} findings", flush=True)
    return 1 if run.findings else 0 if run.tried else 2


if __name__ == "__main__":
    sys.exit(main())
