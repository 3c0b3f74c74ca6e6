"""Trains every feature on every release, off and on, and writes what came of it: `make matrix`.

    python -m tools.matrix                                  all releases in .releases/
    python -m tools.matrix --root 0.20.0.dev0=CHECKOUT      one of your own; releases that are not named are kept

Writes docs/matrix.json, from which `python docs/generate.py` makes the table of docs/support.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature
from tests.harness import checkouts, live_undo, on_and_off
from tests.harness.training import Trainer

FILE = checkouts.ROOT / "docs" / "matrix.json"
# Trained by a script alone: they set arguments of Megatron's parser.
_BY_SCRIPT = "sets arguments of a script: `tests/training` trains it"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Every feature on every release.")
    parser.add_argument("--root", action="append", default=[], metavar="VERSION=DIR", help="a release and its folder")
    parser.add_argument("--release", action="append", default=[], metavar="VERSION", help="of those in .releases/")
    options = parser.parse_args(arguments)
    roots: dict[str, Path | None] = {each: checkouts.folder(each) for each in options.release}
    for text in options.root:
        version, _, folder = text.partition("=")
        if not (Path(folder) / "megatron" / "core").is_dir():
            parser.error(f"--root {text}: there is no megatron/core in {folder or 'it'}")
        roots[str(Version(version))] = Path(folder).resolve()
    if not roots:
        roots = {each: checkouts.folder(each) for each in checkouts.EVERY}
    kept = json.loads(FILE.read_text(encoding="utf-8")).get("releases", {}) if FILE.exists() else {}
    environment = {"torch": torch.__version__, "python": platform.python_version()}
    faults = 0
    for version, root in roots.items():
        rows = dict(sorted(_release(version, root)))
        kept[version] = {"date": f"{datetime.date.today()}", "commit": _commit(), "features": rows}
        failed = {name: row["fault"] for name, row in rows.items() if row.get("fault")}
        trained = sum("layout" in row and not row["fault"] for row in rows.values())
        print(f"{version}: {trained} of {len(rows)} features trained", flush=True)
        for name, fault in failed.items():
            print(f"  {name}: {fault}")
        faults += len(failed)
        # After each: what trains for minutes is not lost if the next one fails.
        document = {"environment": environment, "releases": dict(sorted(kept.items(), key=lambda row: Version(row[0])))}
        FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(faults > 0)


def _release(version: str, root: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    layouts = on_and_off.layouts(version)
    named = {name for names in layouts.values() for name in names}
    for feature in runtime.catalogue():
        if feature.name not in named:
            yield feature.name, {"reason": _reason(feature, version)}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(root, Path(scratch), training=False)
        try:
            for layout, names in layouts.items():
                for name, outcome in on_and_off.trained(trainer, layout, names).items():
                    fault = outcome.fault(on_and_off.numerics_of(runtime.catalogue()[name]))
                    row: dict[str, Any] = {"layout": layout, "fault": fault}
                    if outcome.on and not outcome.error:
                        row["drift"] = float(f"{outcome.drift():.2g}")
                    yield name, row
        finally:
            trainer.close()


def _reason(feature: Feature, version: str) -> str:
    """Why a feature is not trained on a release."""
    for each in live_undo._company(feature.name):
        reasons = each.patches_for(version)[1]
        if reasons:
            return "; ".join(reasons) if each is feature else f"requires {each.name}: {'; '.join(reasons)}"
    if not feature.patches:
        return _BY_SCRIPT
    return "; ".join(live_undo.why_not(feature, "tensor"))


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkouts.ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "no commit"


if __name__ == "__main__":
    sys.exit(main())
