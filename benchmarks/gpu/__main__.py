"""Correctness, kernels and trainings on one GPU, in one command of at most 570 seconds: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu [--seconds 570] [--only STEP ...] [--wheels DIR] [--fresh]
    python -m benchmarks.gpu --tiny [--device cpu|cuda]

Writes NAME.md and NAME.json, named after the device, into $OUT, else into docs/benchmarks/gpu/, after every step. A
second call measures what the first left out, and what was measured with other sources. Nothing is downloaded:
`python -m benchmarks.gpu.wheels DIR` fetches beforehand what a machine without a network lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu import page, wheels
from benchmarks.gpu.steps import ROOT, STEPS, Run
from mindspeed_lite.bench import output

SECONDS = 570.0
KEPT = ROOT / "docs" / "benchmarks" / "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a step failed, 130 after a signal. Bad input exits with 2."""
    began = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: give --tiny as well; a CPU's own benchmarks are `python -m benchmarks`")
    scratch = ROOT / ".bench" / ("gpu-tiny" if options.tiny else "gpu")
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else scratch if options.tiny else KEPT
    try:
        paths = wheels.unpack(Path(options.wheels), ROOT / ".bench" / "wheels") if options.wheels else []
        for folder in (scratch, out):
            output.check_writable(folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.path += map(str, paths)
    # A shell that starts this in the background has SIGINT ignored.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    run = Run(options.device, options.tiny, scratch, _environment(options.device, paths))
    name = page_name(_device_name(options.device))
    before = None if options.fresh else page.newest([folder / f"{name}.json" for folder in (scratch, out, KEPT)])
    found = before if before is not None and before["tiny"] == options.tiny else page.blank(options.tiny)
    found["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    try:
        for number, step in enumerate(steps):
            open_steps = (
                each for each in steps[number + 1 :] if not each.is_current(found["steps"].get(each.name, {}))
            )
            later = sum(each.seconds for each in open_steps)
            left = began + options.seconds - time.monotonic()
            record = found["steps"].setdefault(step.name, {"state": "not started", "about": step.about})
            if left < step.least:
                print(f"== {step.name}: {left:.0f} s are left, and it needs {step.least:.0f}; run it again", flush=True)
            else:
                step.measure(run, record, min(left, max(step.seconds, left - later)))
            page.write(found, name, {scratch, out})
    except KeyboardInterrupt:
        page.write(found, name, {scratch, out})
        return 130
    print(f"wrote {out / name}.md and {name}.json", flush=True)
    return int(any(found["steps"][step.name]["state"] == "failed" for step in steps))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", usage=argparse.SUPPRESS, description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that the campaign runs")
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="for everything (default %(default)g)")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--wheels", metavar="DIR", help="wheels that come before what is installed")
    return parser


def _seconds(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"want a number above 0, not {text}")
    return float(text)


def _device_name(device: str) -> str:
    """As nvidia-smi names it: PyTorch would hold memory of the device in this process."""
    if device == "cpu":
        return "cpu"
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return next(iter(said.splitlines()), "") or "gpu"


def page_name(device: str) -> str:
    """`h100` of `NVIDIA H100 80GB HBM3`; without such a word the whole name."""
    model = re.search(r"\b[A-Z]{1,2}\d{2,4}[A-Z]?\b", device)
    return (model[0] if model else re.sub(r"\W+", "-", device).strip("-")).lower()


def _environment(device: str, paths: Sequence[Path]) -> Mapping[str, str]:
    found: dict[str, Any] = dict(os.environ)
    # Compiling the packages of the wheels takes a quarter of a training's start.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    given = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths), *given])
    # `python` in a training's command is this one; the command then names no folder of this machine.
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return found | {"MINDSPEED_LITE_DEVICE": device, "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
