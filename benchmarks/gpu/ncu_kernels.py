"""ncu on five kernels: time, share of the memory's and of the multiprocessors' peak."""

from __future__ import annotations

import csv
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable

from benchmarks.gpu.units import Figures, SkippedError, Unit
from mindspeed_lite.ops import discovery

METRICS = {
    "gpu__time_duration.sum": "time",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "launch__registers_per_thread": "registers",
}
_CASES = {
    "rms_norm": "16384x4096",
    "cross_entropy": "4096x128256",
    "activation": "8192x28672",
    "grouped_matmul": "32768x2048x1536x64",
    "permute": "8192x4096x64x8",
}


def units(device: str, tiny: bool) -> list[Unit]:
    """A unit for each."""
    return [Unit(f"ncu {name}", functools.partial(_profile, name, device, tiny)) for name in _CASES]


def _profile(name: str, device: str, tiny: bool, keep: Callable[[Figures], None]) -> Figures:
    if shutil.which("ncu") is None:
        raise SkippedError("ncu is not on PATH")
    text = discovery.cases(name).correctness[0] if tiny else _CASES[name]
    command = ["ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none", "--launch-count", "12"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu.kernels", "--device", device]
    ran = subprocess.run([*command, f"{name}:{text}"], capture_output=True, text=True)
    print(ran.stdout + ran.stderr)
    found: Figures = {"case": text, "kernels": kernels_of(ran.stdout)}
    if ran.returncode or not found["kernels"]:
        lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
        found["failed"] = f"exit code {ran.returncode}: {lines[-1] if lines else 'it printed nothing'}"
    return found


def kernels_of(text: str) -> list[dict[str, str]]:
    """A row for each launch of ncu's CSV, which has a line for each metric."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows: dict[str, dict[str, str]] = {}
    for line in csv.DictReader(lines[start:]):
        metric = METRICS.get(line.get("Metric Name") or "")
        if metric is not None:
            row = rows.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
            row[metric] = f"{line['Metric Value']} {line['Metric Unit']}".strip()
    return [*rows.values()]
