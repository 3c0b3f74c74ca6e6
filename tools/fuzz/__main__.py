"""`python -m tools.fuzz`: calls of operators in one environment after another; findings with a command for each.

Exit status: 0 without a finding, 1 with one, 2 where nothing was tried.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from mindspeed_lite.bench import isolated
from mindspeed_lite.ops.discovery import OPERATORS
from tools.fuzz.calls import Call
from tools.fuzz.judge import NO_MKLDNN, tried

# Longest call; the first one also imports PyTorch and compiles kernels where none are kept.
_SECONDS = 240.0
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


def environments(scratch: str) -> dict[str, dict[str, str]]:
    """Name -> environment variables, of those that make a difference on this processor; scratch: an empty folder."""
    flags = {"default"}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags |= set(next((line for line in lines if line.startswith("flags")), "").split())
    found: dict[str, dict[str, str]] = {"as it is": {}}
    found |= {f"onednn {level}": {"ONEDNN_MAX_CPU_ISA": level} for level, flag in _LEVELS.items() if flag in flags}
    found |= {f"aten {level}": {"ATEN_CPU_CAPABILITY": level} for level in ("default", "avx2") if level in flags}
    # `tried` sets PyTorch's switch.
    found[NO_MKLDNN] = {}
    # Kernels that were compiled before would be found elsewhere.
    found["no compiler"] = {"CXX": "no-such-compiler", "MINDSPEED_LITE_CACHE": scratch}
    found["no cache"] = {"MINDSPEED_LITE_CACHE": "/dev/null/none", "XDG_CACHE_HOME": "/dev/null/none"}
    return found


class Run:
    """Prints each kind of finding once; counts calls and findings."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.findings = self.calls = 0
        self._known: set[tuple[str, ...]] = set()

    def environment(self, name: str, variables: Mapping[str, str], seconds: float, seed: int) -> None:
        """Try for so long; another process goes on where one has ended."""
        end, call = time.monotonic() + seconds, None  # type: float, Call | None
        for attempt in itertools.count():
            left = max(1.0, end - time.monotonic())
            work = functools.partial(tried, self.given, name, left, seed + attempt * 1_000_000)
            try:
                with mock.patch.dict(os.environ, variables):
                    for call, text in isolated.messages(work, _SECONDS):
                        self.calls += not text
                        if text:
                            self._print(name, call, text)
                return
            except isolated.ProcessEnded as error:
                self._print(name, call, str(error))
            if call is None or self.given.call is not None or self.given.calls < sys.maxsize or left <= 1.0:
                return

    def _print(self, environment: str, call: Call | None, text: str) -> None:
        # The operator and the words tell findings apart, not the figures.
        kind = (environment, call.operator if call else "", *(word for word in text.split() if word.isalpha()))
        if kind in self._known:
            return
        self._known.add(kind)
        self.findings += 1
        if call is None:
            print(f"FINDING in environment {environment!r}, before the first call: {text}\n", flush=True)
            return
        command = ["python", "-m", "tools.fuzz", "--environment", environment, "--call", call.json()]
        command += ["--plant", self.given.plant] if self.given.plant else []
        print(f"FINDING {call.operator}: {text}", flush=True)
        print(f"  environment: {environment}\n  call: {call.json()}\n  again: {shlex.join(command)}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        found = environments(scratch)
        given = _parser([*found]).parse_args(arguments)
        seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
        chosen = [given.environment] if given.environment else [*found] if given.call is None else [*found][:1]
        if given.call is None:
            of = f"{given.seconds:g} s in {len(chosen)} environments: {', '.join(chosen)}"
            print(f"fuzz: seed {seed}, {of}", flush=True)
        run, end = Run(given), time.monotonic() + given.seconds
        for place, name in enumerate(chosen):
            seconds = max(0.0, end - time.monotonic()) / (len(chosen) - place)
            run.environment(name, found[name], seconds, seed)
    print(f"fuzz: {run.calls} calls, {run.findings} findings", flush=True)
    return 1 if run.findings else 0 if run.calls else 2


def _parser(environments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all environments together (60)")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="at most so many in each environment")
    parser.add_argument("--seed", type=int, help="repeats a run; printed by each")
    parser.add_argument("--environment", choices=environments, help="this one instead of all")
    parser.add_argument("--only", default="", help=f"operators, with commas: {','.join(OPERATORS)}")
    parser.add_argument("--call", help="one call, as a finding prints it")
    parser.add_argument("--plant", default="", help="module:function that every process calls first; for tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
