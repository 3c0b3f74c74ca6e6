"""Trains every feature on every release, off and on, and writes what came of it: `make matrix`.

    python -m tools.matrix                                  all releases in .releases/
    python -m tools.matrix --root 0.20.0.dev0=CHECKOUT      one of your own; releases that are not named are kept
    python -m tools.matrix --feature NAME...                these alone; rows of others are kept

Writes docs/matrix.json, from which `python docs/generate.py` makes the table of docs/support.md.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import platform
import re
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
_ELSEWHERE = {"balance_sequence_lengths": "orders the data of a script: `tests/training` trains it"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Every feature on every release.")
    parser.add_argument("--root", action="append", default=[], metavar="VERSION=DIR", help="a release and its folder")
    parser.add_argument("--release", action="append", default=[], metavar="VERSION", help="of those in .releases/")
    parser.add_argument("--layout", action="append", default=[], choices=[*on_and_off.LAYOUTS], help="all of them")
    parser.add_argument("--feature", nargs="+", choices=[each.name for each in runtime.catalogue()], metavar="NAME")
    options = parser.parse_args(arguments)
    roots: dict[str, Path | None] = {each: checkouts.folder(each) for each in options.release}
    for release, root in roots.items():
        if root is not None and not (root / "megatron").is_dir():
            parser.error(
                f"--release {release}: it is not here: run `python -m tests.harness.checkouts`, or name --root"
            )
    for text in options.root:
        version, _, folder = text.partition("=")
        if not (Path(folder) / "megatron" / "core").is_dir():
            parser.error(f"--root {text}: there is no megatron/core in {folder or 'it'}")
        roots[str(Version(version))] = Path(folder).resolve()
    if not roots:
        roots = {each: checkouts.folder(each) for each in checkouts.EVERY}
    faults = 0
    for version, root in roots.items():
        rows: dict[str, dict[str, Any]] = {}
        try:
            for rows_of_layout in _release(version, root, options.layout, options.feature):
                # After each: what trains for minutes is not lost if the next one fails.
                record("releases", version, rows_of_layout)
                rows |= rows_of_layout
        except AssertionError as error:
            # Of the server that imports the release; the others can be trained all the same.
            print(f"{version}: {error}", flush=True)
            faults += 1
        failed = {name: row["fault"] for name, row in rows.items() if row.get("fault")}
        trained = sum("layout" in row and not row["fault"] for row in rows.values())
        print(f"{version}: {trained} of {len(rows)} features trained", flush=True)
        for name, fault in failed.items():
            print(f"  {name}: {fault}")
        faults += len(failed)
    return int(faults > 0)


def record(section: str, name: str, rows: dict[str, Any]) -> None:
    """Renew `rows` of one release, tag or environment in docs/matrix.json; others of it are kept."""
    with FILE.open("r+", encoding="utf-8") as file:
        # Several of these tools may run side by side.
        fcntl.flock(file, fcntl.LOCK_EX)
        document = json.load(file)
        named = document.setdefault(section, {})
        named[name] = dict(sorted({**named.get(name, {}), **rows}.items()))
        document[section] = dict(sorted(named.items(), key=lambda row: _order(row[0])))
        file.seek(0)
        file.write(_written(document))
        file.truncate()


def stamp() -> dict[str, str]:
    """When, of what commit, and with which torch and Python a row was made."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkouts.ROOT, capture_output=True, text=True)
    return {
        "date": f"{datetime.date.today()}",
        "commit": found.stdout.strip() if found.returncode == 0 else "no commit",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
    }


def _written(document: dict[str, Any]) -> str:
    """As JSON with a line for each row, so that a difference shows what ran again."""
    parts = []
    for section, named in document.items():
        tables = []
        for name, rows in named.items():
            lines = ",\n".join(f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
            tables.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
        parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(tables) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _order(name: str) -> list[Any]:
    """Versions in a name by number; a name without one stands last."""
    return [int(each) for each in re.findall(r"\d+", name)] or [1 << 30]


def _release(
    version: str, root: Path | None, only: Sequence[str], names: Sequence[str] | None
) -> Iterator[dict[str, dict[str, Any]]]:
    """The rows of a release, layout by layout; where they are given, of these layouts and features alone."""
    layouts = on_and_off.layouts(version)
    named = {name for names in layouts.values() for name in names}
    others = [feature for feature in runtime.catalogue() if feature.name not in named]
    yield {each.name: {"reason": _reason(each, version)} for each in others if names is None or each.name in names}
    chosen = {layout: [name for name in its if names is None or name in names] for layout, its in layouts.items()}
    chosen = {layout: its for layout, its in chosen.items() if its and (not only or layout in only)}
    if not chosen:
        return
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(root, Path(scratch), training=False)
        try:
            for layout, features in chosen.items():
                rows: dict[str, dict[str, Any]] = {}
                for name, outcome in on_and_off.trained(trainer, layout, features).items():
                    fault = outcome.fault(on_and_off.numerics_of(runtime.catalogue()[name]))
                    rows[name] = {"layout": layout, "fault": fault, **stamp()}
                    if not fault:
                        rows[name]["drift"] = float(f"{outcome.drift():.2g}")
                    for each in outcome.fallbacks:
                        print(f"  {version} {name} fell back: {each}", flush=True)
                yield rows
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
    return _ELSEWHERE.get(feature.name) or "; ".join(live_undo.why_not(feature, "tensor", version))


if __name__ == "__main__":
    sys.exit(main())
