"""`python -m tools.fuzz`: workers in one environment after another; findings with the command that repeats each.

Exit status: 0 without a finding, 1 with one, 2 where nothing was tried.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from mindspeed_lite.ops.discovery import OPERATORS
from tools.fuzz.calls import Call, draw
from tools.fuzz.judge import finding

# Importing PyTorch, and compiling kernels where none are kept; then the longest call.
_START_SECONDS, _HANG_SECONDS = 60.0, 180.0
# What oneDNN is held to -> a flag in /proc/cpuinfo without which the level is the one before.
_LEVELS = {
    "SSE41": "sse4_1",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx_vnni",
    "AVX512_CORE": "avx512f",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_AMX": "amx_tile",
}
NO_MKLDNN = "no mkldnn"


def environments() -> dict[str, dict[str, str]]:
    """Name -> environment variables, of those that make a difference on this processor."""
    flags = {"default"}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags |= set(next((line for line in lines if line.startswith("flags")), "").split())
    found: dict[str, dict[str, str]] = {"as it is": {}}
    found |= {f"onednn {level}": {"ONEDNN_MAX_CPU_ISA": level} for level, flag in _LEVELS.items() if flag in flags}
    found |= {f"aten {level}": {"ATEN_CPU_CAPABILITY": level} for level in ("default", "avx2") if level in flags}
    # PyTorch's switch; the worker sets it.
    found[NO_MKLDNN] = {}
    found["no compiler"] = {"CXX": "no-such-compiler"}
    found["no cache"] = {"MINDSPEED_LITE_CACHE": "/dev/null/none", "XDG_CACHE_HOME": "/dev/null/none"}
    return found


@contextlib.contextmanager
def variables(name: str) -> Iterator[Mapping[str, str]]:
    """The environment variables of `name`, valid within the block."""
    own = environments()[name]
    if name != "no compiler":
        yield own
        return
    # Kernels that were compiled before would be found.
    with tempfile.TemporaryDirectory() as folder:
        yield {**own, "MINDSPEED_LITE_CACHE": folder}


class Run:
    """Starts workers and prints what they find; `findings` counts it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.findings = self.tried = 0

    def environment(self, name: str, seconds: float, seed: int) -> None:
        """Try for so long in one environment; a worker that ends is replaced by another."""
        end, known = time.monotonic() + seconds, list[str]()
        while self._worker(name, max(1.0, end - time.monotonic()), seed, known):
            seed += 1_000_000
            if self.given.call is not None or self.given.calls < sys.maxsize or end - time.monotonic() <= 1.0:
                return

    def _worker(self, name: str, seconds: float, seed: int, known: list[str]) -> int:
        """The status that the worker ended with."""
        given = self.given
        with tempfile.TemporaryDirectory() as folder, variables(name) as own:
            journal, errors = Path(folder, "call"), Path(folder, "errors")
            command = [sys.executable, "-m", "tools.fuzz", "--journal", str(journal), "--environment", name]
            command += ["--seed", str(seed), "--seconds", str(seconds), "--calls", str(given.calls)]
            command += ["--only", given.only, "--plant", given.plant, "--known", json.dumps(known)]
            command += [] if given.call is None else ["--call", given.call]
            with errors.open("w", encoding="utf-8") as file:
                process = subprocess.Popen(
                    command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=file, text=True
                )
            try:
                output, _ = process.communicate(timeout=_START_SECONDS + seconds + _HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            for line in output.splitlines():
                found = json.loads(line)
                self.tried += found.get("tried", 0)
                if "call" in found:
                    known.append(_kind(Call.of(found["call"]), found["text"]))
                    self._print(name, found["call"], found["text"])
            if process.returncode:
                last = journal.read_text(encoding="utf-8") if journal.exists() else ""
                lines = errors.read_text(encoding="utf-8").splitlines()
                words = [line for line in lines if "Error" in line and not line.startswith(" ")]
                self._print(name, last, f"the process {_ending(process.returncode)}{': ' + words[-1] if words else ''}")
            return process.returncode

    def _print(self, name: str, call: str, text: str) -> None:
        self.findings += 1
        if not call:
            print(f"FINDING in environment {name!r}, before the first call: {text}\n", flush=True)
            return
        command = ["python", "-m", "tools.fuzz", "--environment", name, "--call", call]
        command += ["--plant", self.given.plant] if self.given.plant else []
        print(f"FINDING {Call.of(call).operator}: {text}", flush=True)
        print(f"  environment: {name}\n  call: {call}\n  again: {shlex.join(command)}\n", flush=True)


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "hung and was ended"
    return f"ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"


def _kind(call: Call, text: str) -> str:
    """What tells findings apart: the operator and the words, not the figures."""
    return f"{call.operator}: {' '.join(word for word in text.split() if word.isalpha())}"


def work(given: argparse.Namespace) -> None:
    """Draw calls in this process and print each kind of finding once.

    A call is written into the journal before it is made: the run knows what a process was at that ends or hangs.
    """
    if given.environment == NO_MKLDNN:
        torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    if given.plant:
        module, _, name = given.plant.partition(":")
        getattr(importlib.import_module(module), name)()
    tried, known, end = 0, {*json.loads(given.known)}, time.monotonic() + given.seconds

    chance, operators = random.Random(given.seed), given.only.split(",") if given.only else [*OPERATORS]
    while tried < given.calls and time.monotonic() < end:
        call = draw(chance, max(2, os.cpu_count() or 1), operators) if given.call is None else Call.of(given.call)
        tried += 1
        given.journal.write_text(call.json(), encoding="utf-8")
        text = finding(call)
        if text and _kind(call, text) not in known:
            known.add(_kind(call, text))
            print(json.dumps({"call": call.json(), "text": text}), flush=True)
        if given.call is not None:
            break
    print(json.dumps({"tried": tried}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    names = list(environments())
    parser.add_argument("--seconds", type=float, default=60.0, help="for all environments together (60)")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="at most so many in each environment")
    parser.add_argument("--seed", type=int, help="repeats a run; printed by each")
    parser.add_argument("--environment", choices=names, help="this one instead of all")
    parser.add_argument("--only", default="", help=f"operators, with commas: {','.join(OPERATORS)}")
    parser.add_argument("--call", help="one call, as a finding prints it")
    parser.add_argument("--plant", default="", help="module:function that is called first in every worker; for tests")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--known", default="[]", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.journal is not None:
        work(given)
        return 0
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    chosen = [given.environment] if given.environment else names if given.call is None else names[:1]
    if given.call is None:
        print(f"fuzz: seed {seed}, {given.seconds:g} s in {len(chosen)} environments: {', '.join(chosen)}", flush=True)
    run, end = Run(given), time.monotonic() + given.seconds
    for place, name in enumerate(chosen):
        run.environment(name, max(0.0, end - time.monotonic()) / (len(chosen) - place), seed)
    print(f"fuzz: {run.tried} calls, {run.findings} findings", flush=True)
    return 1 if run.findings else 0 if run.tried else 2


if __name__ == "__main__":
    sys.exit(main())
