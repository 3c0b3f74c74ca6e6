"""Everything that one GPU is to tell, in one command of at most 570 seconds: `python -m benchmarks.gpu`.

    python -m benchmarks.gpu [--seconds 570] [--only PART ...] [--wheels DIR] [--fresh]
    python -m benchmarks.gpu --tiny [--device cpu|cuda]

Writes NAME.md and NAME.json, named after the device, into $OUT, else into docs/benchmarks/gpu/, after every part.
A second call measures what the first left out. Nothing is downloaded: `python -m benchmarks.gpu.wheels DIR` fetches
beforehand what a machine without a network lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.campaign import Campaign
from benchmarks.gpu.parts import PARTS, SECONDS
from benchmarks.gpu.wheels import WheelError, missing_packages, unpack

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / ".bench" / "gpu"
KEPT = ROOT / "docs" / "benchmarks" / "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a unit failed, 2 for bad input, 130 after a signal."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    reason = _wrong(options)
    if reason:
        print(f"benchmarks.gpu: error: {reason}", file=sys.stderr)
        return 2
    # A shell that starts this in the background has SIGINT ignored.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler)
    name = page_name(_device_name(options.device))
    scratch = SCRATCH.with_name("gpu-tiny") if options.tiny else SCRATCH
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else scratch if options.tiny else KEPT
    try:
        paths = unpack(Path(options.wheels), ROOT / ".bench" / "wheels") if options.wheels else []
        campaign = Campaign(name, options.device, options.tiny, scratch, out, _environment(options.device, paths))
    except (WheelError, OSError) as error:
        print(f"benchmarks.gpu: error: {error}", file=sys.stderr)
        return 2
    campaign.notes = [f"{package} is not installed: {what} is left out" for package, what in missing_packages().items()]
    if not options.fresh:
        campaign.resume([scratch, out, KEPT])
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    try:
        return campaign.run(parts, began + options.seconds)
    except KeyboardInterrupt:
        campaign.write()
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that the campaign runs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (default %(default)g)")
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--wheels", metavar="DIR", help="wheels that come before what is installed")
    return parser


def _wrong(options: argparse.Namespace) -> str:
    if options.device == "cpu" and not options.tiny:
        return "--device cpu: give --tiny as well; a CPU's own benchmarks are `python -m benchmarks`"
    if not options.seconds > 0:
        return f"--seconds: want a number above 0, not {options.seconds:g}"
    unknown = set(options.only or ()) - {part.name for part in PARTS}
    if unknown:
        return f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}"
    return ""


def _device_name(device: str) -> str:
    """As nvidia-smi names it, which asks no torch."""
    if device == "cpu":
        return "cpu"
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "gpu"
    return next(iter(asked.stdout.splitlines()), "") or "gpu"


def page_name(device: str) -> str:
    """`h100` of `NVIDIA H100 80GB HBM3`; without such a word the whole name."""
    model = re.search(r"\b[A-Z]{1,2}\d{2,4}[A-Z]?\b", device)
    return (model[0] if model else re.sub(r"\W+", "-", device).strip("-")).lower()


def _environment(device: str, paths: Sequence[Path]) -> dict[str, str]:
    found = dict(os.environ)
    # Compiling the packages of the wheels takes a quarter of a training's start.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    given = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths), *given])
    # `python` in a training's command is this one; the command then names no folder of this machine.
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return found | {"MINDSPEED_LITE_DEVICE": device, "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    sys.exit(main())
