"""compute-sanitizer's memcheck over small cases of the operators with kernels of their own."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable

from benchmarks.gpu.units import Figures, SkippedError, Unit
from mindspeed_lite.ops import discovery

_TOOL = "compute-sanitizer"
_FIRST = ("rms_norm", "activation", "cross_entropy")
_SECOND = ("grouped_matmul", "permute", "moe_router", "adamw", "linear_cross_entropy")


def units(device: str, tiny: bool) -> list[Unit]:
    """Two processes: what is stopped in the second leaves the first."""
    return [Unit(f"memcheck {group[0]}", functools.partial(_check, group, device)) for group in (_FIRST, _SECOND)]


def _check(names: tuple[str, ...], device: str, keep: Callable[[Figures], None]) -> Figures:
    if shutil.which(_TOOL) is None:
        raise SkippedError(f"{_TOOL} is not on PATH")
    cases = [f"{name}:{discovery.cases(name).correctness[0]}" for name in names]
    command = [_TOOL, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    ran = subprocess.run(
        [*command, "-m", "benchmarks.gpu.kernels", "--device", device, *cases], capture_output=True, text=True
    )
    lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    print("\n".join(lines))
    summary = next((line for line in reversed(lines) if "ERROR SUMMARY" in line), lines[-1] if lines else "")
    found: Figures = {"operators": [name for name in names if f"ran {name}" in lines], "summary": summary}
    if ran.returncode:
        first = next((line for line in lines if "Invalid" in line or "Error:" in line), summary)
        found["failed"] = f"exit code {ran.returncode}: {first}"
    return found
