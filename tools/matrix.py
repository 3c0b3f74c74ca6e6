"""Trains every feature on every release, off and on, and writes what came of it: `make matrix`.

    python -m tools.matrix                                  all releases in .releases/
    python -m tools.matrix --root 0.20.0.dev0=CHECKOUT      one of your own; releases that are not named are kept
    python -m tools.matrix --feature NAME...                these alone; rows of others are kept
    python -m tools.matrix --environment 0.16.1             some features and all operators, with this Python and torch
    python -m tools.matrix --scripts MEGATRON.git           Megatron's own script of every tag, off and with auto

Writes docs/matrix.json, from which `python docs/generate.py` makes the tables of docs/support.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from mindspeed_lite import runtime
from mindspeed_lite.bench.selftest import FAILED, numerics
from mindspeed_lite.engine import Feature
from tests.harness import checkouts, on_and_off
from tests.harness.feature_layouts import company, why_not
from tests.harness.training import LAYOUTS, MODEL, NO_DROPOUT, Result, Trainer, fault

FILE = checkouts.ROOT / "docs" / "matrix.json"
# Trained by a script alone: they set arguments of Megatron's parser.
_BY_SCRIPT = "sets arguments of a script: `tests/training` trains it"
_ELSEWHERE = {"balance_sequence_lengths": "orders the data of a script: `tests/training` trains it"}
# With another Python and torch.
_BASIC = (
    "gradient_accumulation_fusion",
    "reuse_fp32_param",
    "use_flash_attn",
    "use_fused_adamw",
    "use_fused_cross_entropy",
    "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb",
    "use_fused_swiglu",
)
# A wheel of a release holds no script. The newest release has no tag; that of its series is taken.
TAGS = (*(f"core_v{each}" for each in checkouts.EVERY[:-1]), "core_v0.19.0", "main")
# Paths that the script needs; the older tags have no builders.
_PATHS = ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
STEPS = 3
Rows = dict[str, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and record; 1 where something has a fault, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Every feature on every release.")
    parser.add_argument("--root", action="append", default=[], metavar="VERSION=DIR", help="a release and its folder")
    parser.add_argument("--release", action="append", default=[], metavar="VERSION", help="of those in .releases/")
    parser.add_argument("--feature", nargs="+", choices=[each.name for each in runtime.catalogue()], metavar="NAME")
    parser.add_argument("--environment", metavar="VERSION", help="a release for this Python and torch; fetched")
    parser.add_argument("--scripts", type=Path, metavar="GIT", help="a clone of Megatron-LM")
    parser.add_argument("--tag", nargs="+", choices=TAGS, default=TAGS, help="of --scripts; all of them")
    options = parser.parse_args(arguments)
    try:
        if options.environment:
            return _in_this_environment(options.environment, checkouts.fetched(options.environment))
        if options.scripts:
            return int(sum(_script(options.scripts, tag) for tag in options.tag) > 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    roots: dict[str, Path | None] = {each: checkouts.folder(each) for each in options.release}
    for text in options.root:
        version, _, folder = text.partition("=")
        roots[str(Version(version))] = Path(folder or "?").resolve()
    for release, root in roots.items():
        if root is not None and not (root / "megatron" / "core").is_dir():
            parser.error(f"{release}: there is no megatron/core in {root}; `python -m tests.harness.checkouts` fetches")
    roots = roots or {each: checkouts.folder(each) for each in checkouts.EVERY}
    return int(sum(_on_release(version, root, options.feature) for version, root in roots.items()) > 0)


def record(section: str, name: str, rows: Rows) -> None:
    """Renew `rows` of one release, tag or environment in docs/matrix.json; others of it are kept."""
    with FILE.open("r+", encoding="utf-8") as file:
        # Several of these may run side by side.
        fcntl.flock(file, fcntl.LOCK_EX)
        document = json.load(file)
        named = document.setdefault(section, {})
        named[name] = dict(sorted({**named.get(name, {}), **rows}.items()))
        document[section] = dict(sorted(named.items(), key=lambda row: _order(row[0])))
        file.seek(0)
        file.write(_written(document))
        file.truncate()


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


def _order(name: str) -> list[int]:
    """Versions in a name by number; a name without one stands last."""
    return [int(each) for each in re.findall(r"\d+", name)] or [1 << 30]


def _stamp() -> dict[str, str]:
    """When, of what commit, and with which torch and Python a row was made."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkouts.ROOT, capture_output=True, text=True)
    return {
        "date": f"{datetime.date.today()}",
        "commit": found.stdout.strip() if found.returncode == 0 else "no commit",
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def _trainer(root: Path | None, scratch: Path, training: bool = False) -> Iterator[Trainer]:
    trainer = Trainer(root, scratch, training)
    try:
        yield trainer
    finally:
        trainer.close()


def _fault(name: str, outcome: on_and_off.Outcome) -> str:
    """What the feature promises and does not keep, or ""."""
    return outcome.fault(on_and_off.numerics_of(runtime.catalogue()[name]))


def _drift(outcomes: Iterable[on_and_off.Outcome]) -> float:
    return float(f"{max((each.drift() for each in outcomes), default=0.0):.2g}")


def _on_release(version: str, root: Path | None, only: Sequence[str] | None) -> int:
    """Train features on a release, layout by layout; the number of faults."""
    layouts = on_and_off.layouts(version)
    chosen = {layout: [name for name in its if only is None or name in only] for layout, its in layouts.items()}
    named = {name for names in layouts.values() for name in names}
    others = [each for each in runtime.catalogue() if each.name not in named and (only is None or each.name in only)]
    record("releases", version, {each.name: {"reason": _reason(each, version)} for each in others})
    faults = trained = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with _trainer(root, Path(scratch)) as trainer:
                for layout, features in chosen.items():
                    rows: Rows = {}
                    for name in features:
                        outcome = on_and_off.train(trainer, layout, name)
                        text = _fault(name, outcome)
                        drift = {} if text else {"drift": _drift([outcome])}
                        rows[name] = {"layout": layout, "fault": text, **_stamp(), **drift}
                        if text:
                            print(f"  {version} {name}: {text}", flush=True)
                        faults += bool(text)
                    # After each: what trains for minutes is not lost if the next one fails.
                    record("releases", version, rows)
                    trained += len(rows)
        except AssertionError as error:
            # Of the server that imports the release; the others can be trained all the same.
            print(f"{version}: {error}", flush=True)
            return 1
    print(f"{version}: {trained - faults} of {trained + len(others)} features trained", flush=True)
    return faults


def _reason(feature: Feature, version: str) -> str:
    """Why a feature is not trained on a release."""
    for each in company(feature.name):
        reasons = each.patches_for(version)[1]
        if reasons:
            return "; ".join(reasons) if each is feature else f"requires {each.name}: {'; '.join(reasons)}"
    if not feature.patches:
        return _BY_SCRIPT
    return _ELSEWHERE.get(feature.name) or "; ".join(why_not(feature, "tensor", version))


def _in_this_environment(release: str, root: Path | None) -> int:
    """Train some features off and on, and check every operator, in this interpreter; 1 with a fault."""
    name = f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__.partition('+')[0]}"
    checks = numerics.checks("cpu", quick=True)
    wrong = [check.name for check in checks if check.run().status == FAILED]
    with tempfile.TemporaryDirectory() as scratch, _trainer(root, Path(scratch)) as trainer:
        found = {name: on_and_off.train(trainer, "plain", name) for name in _BASIC}
    bad = [f"{name}: {text}" for name, outcome in found.items() if (text := _fault(name, outcome))]
    row = {
        "features": len(found) - len(bad),
        "of": len(found),
        "operators": len(checks) - len(wrong),
        "checks": len(checks),
        "fault": "; ".join([*bad, *wrong]),
        "drift": _drift(found.values()),
    }
    record("environments", name, {release: {**row, **_stamp()}})
    print(f"{name}, megatron-core {release}: {row}", flush=True)
    return int(bool(bad or wrong))


def _script(git: Path, tag: str) -> int:
    """Train a tag's `pretrain_gpt.py` in every layout; the number of faults. Raises ValueError without such a tag."""
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "megatron-lm")
        _extract(git, tag, root)
        try:
            with _trainer(root, Path(scratch), training=True) as trainer:
                for layout in LAYOUTS:
                    row = script_row(trainer, root, layout)
                    record("scripts", tag, {layout: {**row, **_stamp()}})
                    print(f"{tag} {layout}: {row['fault'] or row['drift']}, {row['on']} on", flush=True)
                    faults += bool(row["fault"])
        except AssertionError as error:
            # The others can be trained all the same.
            print(f"{tag}: {error}", flush=True)
            return faults + 1
    return faults


def script_row(trainer: Trainer, root: Path, layout: str) -> dict[str, Any]:
    """One layout, off and with auto: the largest relative distance of two losses, features on, and what is wrong.

    Each must end with 0, name a reason for every feature that auto leaves off, and keep its losses and gradient norms
    within rounding of the run without features.
    """
    ranks, flags = LAYOUTS[layout]
    # The mock data of older tags holds tokens up to 4096.
    words = [*MODEL, "--vocab-size", "5000", "--train-iters", str(STEPS), *NO_DROPOUT, *flags.split()]
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
    """What the script needs of `tag`, into `root`. Raises ValueError where git has no such tag."""
    command = ["git", f"--git-dir={git if (git / 'objects').is_dir() else git / '.git'}"]
    listed = subprocess.run([*command, "ls-tree", "--name-only", tag], capture_output=True, text=True)
    if listed.returncode:
        raise ValueError(f"{listed.stderr.strip()}: --scripts {git} --tag {tag}")
    there = [each for each in _PATHS if each in listed.stdout.split()]
    archive = subprocess.run([*command, "archive", tag, *there], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(root, filter="data")


if __name__ == "__main__":
    sys.exit(main())
