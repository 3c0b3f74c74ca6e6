"""The tests marked `cuda`, which run kernels on the device."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys

from benchmarks.gpu.units import Figures, SkippedError, Unit

_BAD = re.compile(r"^(?:FAILED|ERROR) (tests/\S+)", re.MULTILINE)


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """One unit."""
    return [Unit("pytest", functools.partial(_run, tiny))]


def _run(tiny: bool) -> Figures:
    lacking = [name for name in ("pytest", "hypothesis", "xdist") if importlib.util.find_spec(name) is None]
    if lacking:
        raise SkippedError(f"not installed: {', '.join(lacking)}")
    chosen = "tests/ops/test_grouped_matmul_cuda.py" if tiny else "tests/ops"
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=line", "-m", "cuda"]
    command += [chosen, "-k", "not results_on_a_gpu"]  # the part `numerics` asks for the same
    command += [] if tiny else ["--numprocesses", "8"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ran.stdout)
    last = next((line for line in reversed(ran.stdout.splitlines()) if line.strip()), "it printed nothing")
    passed = re.search(r"(\d+) passed", last)
    bad = _BAD.findall(ran.stdout)
    found: Figures = {"passed": int(passed[1]) if passed else 0, "bad": bad, "summary": last, "command": command[1:]}
    if bad:
        found["failed"] = f"{len(bad)} tests, the first {bad[0]}"
    elif ran.returncode not in (0, 5):
        found["failed"] = f"pytest ended with {ran.returncode}: {last}"
    return found
