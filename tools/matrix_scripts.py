"""Trains Megatron's own `pretrain_gpt.py` of several tags, off and with `--mindspeed-lite-auto`, layout by layout.

    python -m tools.matrix_scripts --git MEGATRON.git                       every tag, from a clone
    python -m tools.matrix_scripts --git MEGATRON.git --tag core_v0.18.2 --layout tp2 pp2

Each must end with 0, name a reason for every feature that auto leaves off, and keep its losses and gradient norms
within rounding of the run without features. Writes docs/matrix.json, from which `python docs/generate.py` makes the
table of docs/support.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness import checkouts
from tests.harness.training import LAYOUTS, MODEL, NO_DROPOUT, Result, Trainer, fault
from tools import matrix

# A wheel of a release holds no script. The newest release has no tag; that of its series is taken.
TAGS = (*(f"core_v{each}" for each in checkouts.EVERY[:-1]), "core_v0.19.0", "main")
# Paths that the script needs; the older tags have no builders.
_PATHS = ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
STEPS = 3
# The mock data of older tags holds tokens up to 4096.
_VOCABULARY = ["--vocab-size", "5000"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix_scripts", description="Megatron's script, by tag.")
    parser.add_argument("--git", required=True, type=Path, help="a clone of Megatron-LM, with or without a work tree")
    parser.add_argument("--tag", nargs="+", choices=TAGS, default=TAGS, help="tags; all of them")
    parser.add_argument("--layout", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS], help="layouts; all of them")
    options = parser.parse_args(arguments)
    faults = 0
    for tag in options.tag:
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch, "megatron-lm")
            try:
                _extract(options.git, tag, root)
            except subprocess.CalledProcessError as error:
                print(f"error: {error.stderr.decode().strip()}: --git {options.git} --tag {tag}", file=sys.stderr)
                return 2
            try:
                trainer = Trainer(root, Path(scratch), training=True)
            except AssertionError as error:
                # The others can be trained all the same.
                print(f"{tag}: {error}", flush=True)
                faults += 1
                continue
            try:
                for layout in options.layout:
                    row = trained(trainer, root, layout)
                    matrix.record("scripts", tag, {layout: {**row, **matrix.stamp()}})
                    print(f"{tag} {layout}: {row['fault'] or row['drift']}, {row['on']} on", flush=True)
                    faults += bool(row["fault"])
            finally:
                trainer.close()
    return int(faults > 0)


def trained(trainer: Trainer, root: Path, layout: str) -> dict[str, Any]:
    """One layout, off and with auto: the largest relative distance of two losses, features on, and what is wrong."""
    ranks, flags = LAYOUTS[layout]
    words = [*MODEL, *_VOCABULARY, "--train-iters", str(STEPS), *NO_DROPOUT, *flags.split()]
    argv = [str(root / "pretrain_gpt.py"), *words]
    report = trainer.scratch / f"{layout}.json"
    # The script compiles what it reads data with by `make`, which asks python3 for pybind11 and python3-config for the
    # name of the result; an environment has the one, its interpreter the other.
    folders = Path(sys.executable).parent, Path(sys.executable).resolve().parent
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    job: dict[str, Any] = dict(entry="script", arm="adaptor", nproc=ranks, timeout=400, env={"PATH": path})
    off = trainer.run(argv=argv, **job)
    on = trainer.run(argv=[*argv, "--mindspeed-lite-auto", "--mindspeed-lite-report", str(report)], **job)
    row: dict[str, Any] = {"fault": _ended(off, "off") or _ended(on, "auto"), "on": 0}
    if row["fault"]:
        return row
    losses = [*zip(off.losses(), on.losses(), strict=False)]
    row["drift"] = float(f"{max((abs(a - b) / abs(a) for a, b in losses), default=0.0):.2g}")
    entries = [each for each in json.loads(report.read_text())["entries"] if not each["feature"].startswith("device_")]
    row["on"] = sum(each["status"] == "applied" for each in entries)
    silent = [each["feature"] for each in entries if each["status"] != "applied" and not each["reasons"]]
    if len(losses) != STEPS:
        row["fault"] = f"{len(losses)} losses of {STEPS} steps"
    elif silent:
        row["fault"] = f"left off without a reason: {', '.join(silent)}"
    else:
        row["fault"] = fault(off.steps(), on.steps())
    return row


def _ended(result: Result, which: str) -> str:
    """The last line of the log of a rank that failed; "" if none did."""
    for rank, code in enumerate(result.codes):
        if code:
            lines = result.log(rank).strip().splitlines()
            print("\n".join(f"  {line}" for line in lines[-40:]), file=sys.stderr)
            return f"{which}: rank {rank} ended with {code}: {lines[-1] if lines else ''}"
    return ""


def _extract(git: Path, tag: str, root: Path) -> None:
    """What the script needs of `tag`, into `root`; raises CalledProcessError where git has no such tag."""
    command = ["git", f"--git-dir={git if (git / 'objects').is_dir() else git / '.git'}"]
    listed = subprocess.run([*command, "ls-tree", "--name-only", tag], check=True, capture_output=True, text=False)
    there = [each for each in _PATHS if each in listed.stdout.decode().split()]
    archive = subprocess.run([*command, "archive", tag, *there], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(root, filter="data")


if __name__ == "__main__":
    sys.exit(main())
