"""Run the standing configurations through `mindspeed-lite bench` and write the page that shows them.

    python -m benchmarks [--only NAME ...] [--page docs/benchmarks/cpu.md]

Reports and plots go to the folder beside the page, logs to .bench/. A configuration that is not run keeps what the
folder holds of it. `--only operators` runs `mindspeed-lite bench-ops` instead. On a GPU: `python -m benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, Configuration

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = ROOT / ".bench"
OPERATORS = "operators"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; the exit code is that of the worst benchmark."""
    options = _parser().parse_args(arguments)
    page = Path(options.page).absolute() if options.page else ROOT / "docs" / "benchmarks" / "cpu.md"
    kept = page.with_suffix("")
    kept.mkdir(parents=True, exist_ok=True)
    chosen = CONFIGURATIONS["cpu"]
    # Commands and paths in reports are relative to it; `python` in them is the one that runs this.
    os.chdir(ROOT)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    code = 0
    for configuration in chosen:
        if not options.only or configuration.name in options.only:
            code = max(code, _measure(configuration, kept / configuration.name))
    if options.only and OPERATORS in options.only:
        code = max(code, _measure_operators(kept / OPERATORS))
    page.write_text(page_of(chosen, kept))
    print(f"wrote {page}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    names = [*(each.name for each in CONFIGURATIONS["cpu"]), OPERATORS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--page", metavar="FILE", help="the page to write (default docs/benchmarks/cpu.md)")
    return parser


def bench_arguments(configuration: Configuration) -> list[str]:
    """Options of `mindspeed-lite bench` for a configuration, without --out and the command."""
    # What `mindspeed-lite run` does by default; in both arms, so that it is no part of the gain.
    return [*configuration.bench.split(), "--allocator", "keep", "--title", configuration.name]


def _measure(configuration: Configuration, kept: Path) -> int:
    from mindspeed_lite.cli import main as mindspeed_lite

    scratch = SCRATCH / configuration.name
    shutil.rmtree(scratch, ignore_errors=True)
    began = time.monotonic()
    print(f"== {configuration.name}: {configuration.about}", flush=True)
    code = mindspeed_lite(
        ["bench", *bench_arguments(configuration), "--out", os.path.relpath(scratch), "--", *configuration.command()]
    )
    print(f"== {configuration.name}: {time.monotonic() - began:.0f} s", flush=True)
    keep(scratch, kept)
    return code


def _measure_operators(kept: Path) -> int:
    from mindspeed_lite.cli import main as mindspeed_lite

    scratch = SCRATCH / OPERATORS
    shutil.rmtree(scratch, ignore_errors=True)
    print(f"== {OPERATORS}", flush=True)
    code = mindspeed_lite(["bench-ops", "--device", "cpu", "--out", os.path.relpath(scratch)])
    keep(scratch, kept)
    return code


def keep(scratch: Path, kept: Path) -> None:
    """What belongs beside the page: the report as data, as a page, and its plots. A failed run replaces none."""
    report = scratch / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["complete"]:
        print(f"{kept.name} was not measured to its end: {kept} stays as it was", flush=True)
        return
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for path in scratch.iterdir():
        if path.name in ("report.json", "report.md") or path.suffix == ".png":
            shutil.copy(path, kept / path.name)


def page_of(configurations: Sequence[Configuration], kept: Path) -> str:
    """The page of the reports in the folder."""
    reports = {
        each.name: json.loads(path.read_text())
        for each in configurations
        if (path := kept / each.name / "report.json").is_file()
    }
    if not reports:
        return "# Trainings and operators on CPU\n\nNothing has been measured yet.\n"
    first = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["environment"]["versions"].items())
    created = sorted(report["created"][:10] for report in reports.values())
    days = " to ".join(dict.fromkeys((created[0], created[-1])))
    lines = [
        "# Trainings and operators on CPU",
        "",
        f"Measured with `make bench` on {first['environment']['device']}, {days}; {versions}.",
        "Both arms use the same allocator, threads and data; off is Megatron as it is (on the CPU with the device",
        "layer alone). A ratio is the mean of pairs measured one after the other, with its 95 % interval. Only ratios",
        "within a row are comparable: machines differ. Every name leads to the whole report.",
        "",
        "| Training | Features | Step off | Step on | Speed | Peak memory | Loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for configuration in configurations:
        if configuration.name in reports:
            lines += _rows(configuration, reports[configuration.name], kept.name)
    lines += ["", "Commands, from the repository's root with the environment that `make install` makes:", "", "```sh"]
    for report in reports.values():
        lines += [f"{_command(report)} -- \\", f"  {shlex.join(report['command'])}"]
    lines += ["```", ""]
    for configuration in configurations:
        if configuration.name in reports:
            lines += [f"## {configuration.name}", "", f"{configuration.about}.", ""]
            if (kept / configuration.name / "time.png").is_file():
                lines += [f"![time of a step]({kept.name}/{configuration.name}/time.png)", ""]
    if (kept / OPERATORS / "report.md").is_file():
        lines += ["## Operators", "", f"[Every operator against plain PyTorch]({kept.name}/{OPERATORS}/report.md)", ""]
        lines += _behind(json.loads((kept / OPERATORS / "report.json").read_text()))
    return "\n".join(lines)


def _behind(report: Mapping[str, Any]) -> list[str]:
    """The cases in which a contender was faster beyond the noise."""
    rows = [
        f"| {row['operator']} | {row['case']}, {row['direction']} | {each['name']} | {each['ratio']:.2f}x |"
        for row in report["rows"]
        for each in row["contenders"]
        if each["ratio"] is not None and each["ratio_high"] < 1
    ]
    if not rows:
        return []
    return [
        f"Another contender was faster in {len(rows)} comparisons. Training runs both passes; evaluation and",
        "recomputation run forward alone.",
        "",
        "| Operator | Case | Faster | Its time over ours |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _command(report: Mapping[str, Any]) -> str:
    """The command that made a report, without --out: as it was, not as the configuration stands now."""
    settings = report["settings"]
    names = [arm["name"] for arm in report["arms"] if arm["role"] == "on"]
    chosen = ["--features", names[0].replace("+", ",")] if settings["mode"] == "features" else [f"--{settings['mode']}"]
    parts = ["mindspeed-lite", "bench", *chosen]
    if settings["beside"]:
        parts += ["--beside", ",".join(settings["beside"])]
    for name in ("repeats", "warmup", "steps", "allocator"):
        parts += [f"--{name}", str(settings[name])]
    return shlex.join([*parts, "--title", report["title"]])


def _rows(configuration: Configuration, report: Mapping[str, Any], folder: str) -> list[str]:
    from mindspeed_lite.bench import wording

    arms = {arm["name"]: arm for arm in report["arms"]}
    off = arms["off"]["summary"]
    rows = []
    for row in report["comparisons"]:
        on = arms[row["arm"]]["summary"]
        if on is None or off is None:
            rows.append(f"| {configuration.name} | {row['arm']} | failed | | | | |")
            continue
        name = f"[{configuration.name}]({folder}/{configuration.name}/report.md)"
        cells = [
            name,
            ", ".join(arms[row["arm"]]["features"]) or row["arm"],
            f"{off['step_seconds'] * 1e3:,.0f} ms",
            f"{on['step_seconds'] * 1e3:,.0f} ms",
            interval(row["speed"]),
            f"{interval(row['memory'])} of {wording.size(off['peak_memory_bytes'])}",
            row["loss"]["verdict"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def interval(found: Mapping[str, Any] | None) -> str:
    """A ratio with its interval, as far as they are known."""
    if found is None:
        return "-"
    if found["low"] is None:
        return f"{found['ratio']:.2f}"
    return f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
