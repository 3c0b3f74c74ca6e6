"""The tests marked `cuda`, which run kernels on the device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable

from benchmarks.gpu.units import Figures, SkippedError, Unit

_LINE = re.compile(r"(PASSED|FAILED|ERROR) (?:\[ *\d+%\] )?(tests/\S+)|(tests/\S+) (PASSED|FAILED|ERROR)")
_MOST_NAMES = 40


def units(device: str, tiny: bool) -> list[Unit]:
    """One unit, whose counts are kept while the tests run."""

    def run(keep: Callable[[Figures], None]) -> Figures:
        return _run(device, tiny, keep)

    return [Unit("pytest", run)]


def _run(device: str, tiny: bool, keep: Callable[[Figures], None]) -> Figures:
    lacking = [name for name in ("pytest", "hypothesis", "xdist") if importlib.util.find_spec(name) is None]
    if lacking:
        raise SkippedError(f"not installed: {', '.join(lacking)}")
    chosen = "tests/ops/test_grouped_matmul_cuda.py" if tiny else "tests/ops"
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--tb=line", "-m", "cuda", chosen]
    command += ["-k", "not results_on_a_gpu"]  # the part `numerics` asks for the same
    command += [] if tiny else ["--numprocesses", "8"]
    found: Figures = {"passed": 0, "bad": [], "command": command[1:]}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            match = _LINE.search(line)
            if match is None:
                continue
            state, name = (match[1], match[2]) if match[1] else (match[4], match[3])
            if state == "PASSED":
                found["passed"] += 1
            elif len(found["bad"]) < _MOST_NAMES:
                found["bad"].append(name)
            if (found["passed"] + len(found["bad"])) % 50 == 1:
                keep(found)
    found["summary"] = last
    if found["bad"]:
        found["failed"] = f"{len(found['bad'])} tests, the first {found['bad'][0]}"
    elif process.returncode not in (0, 5):
        found["failed"] = f"pytest ended with {process.returncode}: {last}"
    return found
