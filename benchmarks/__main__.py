"""The standing configurations through `mindspeed-lite bench`: `python -m benchmarks [--only NAME ...] [--page FILE]`.

Reports and plots go to the folder next to the page, logs to .bench/. A configuration that is not run keeps what the
folder holds of it. `--only operators` runs `mindspeed-lite bench-ops` instead. On a GPU: `python -m benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, Configuration
from benchmarks.harness import ROOT
from mindspeed_lite.bench.wording import interval, size

OPERATORS = "operators"
TINY = "--all --repeats 1 --warmup 1 --steps 2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write; the exit code is that of the worst benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition(":")[0])
    names = [*(each.name for each in CONFIGURATIONS["cpu"]), OPERATORS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--tiny", action="store_true", help="a tiny training instead: shows that it runs")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu.md", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    page = options.page.absolute()
    kept = page.with_suffix("")
    kept.mkdir(parents=True, exist_ok=True)
    # Commands and paths in reports are relative to it; `python` in them is the one that runs this.
    os.chdir(ROOT)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    configurations, codes = CONFIGURATIONS["tiny"][:1] if options.tiny else CONFIGURATIONS["cpu"], [0]
    for each in configurations:
        if not options.only or each.name in options.only:
            print(f"== {each.name}: {each.about}", flush=True)
            codes.append(_run(_words(each), each.command(), kept / each.name))
    if options.only and OPERATORS in options.only:
        codes.append(_run(["bench-ops", "--device", "cpu"], [], kept / OPERATORS))
    page.write_text(page_of(configurations, kept))
    print(f"wrote {page}")
    return max(codes)


def _words(configuration: Configuration) -> list[str]:
    """The `bench` command; both arms have the allocator that `mindspeed-lite run` chooses, so it is no gain."""
    return ["bench", *(configuration.bench or TINY).split(), "--allocator", "keep", "--title", configuration.name]


def _run(words: Sequence[str], command: Sequence[str], kept: Path) -> int:
    from mindspeed_lite.cli import main as mindspeed_lite

    scratch = ROOT / ".bench" / kept.name
    shutil.rmtree(scratch, ignore_errors=True)
    began = time.monotonic()
    code = mindspeed_lite([*words, "--out", os.path.relpath(scratch), *(["--", *command] if command else [])])
    print(f"== {kept.name}: {time.monotonic() - began:.0f} s", flush=True)
    keep(scratch, kept)
    return code


def keep(scratch: Path, kept: Path) -> None:
    """Copy report and plots next to the page; a failed run replaces none."""
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
    measured = [each for each in configurations if (kept / each.name / "report.json").is_file()]
    if not measured:
        return "# Trainings and operators on CPU\n\nNothing has been measured yet.\n"
    reports = {each.name: json.loads((kept / each.name / "report.json").read_text()) for each in measured}
    first = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["environment"]["versions"].items())
    created = sorted(report["created"][:10] for report in reports.values())
    days = " to ".join(dict.fromkeys((created[0], created[-1])))
    lines = [
        "# Trainings and operators on CPU",
        "",
        f"Measured with `make bench` on {first['environment']['device']}, {days}; {versions}.",
        "`python -m benchmarks --only NAME` repeats one training; its report, linked from the name, has its features.",
        "Off is Megatron with the device layer. A ratio is the mean of consecutive pairs, with its 95 % interval.",
        "",
        "| Training | Step off | Step on | Speed | Peak memory, off to on | Loss |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for each in measured for row in _rows(each, reports[each.name], kept.name)),
        "",
    ]
    if (kept / OPERATORS / "report.md").is_file():
        lines += ["## Operators", "", f"[Every operator against plain PyTorch]({kept.name}/{OPERATORS}/report.md)", ""]
    return "\n".join(lines)


def _rows(configuration: Configuration, report: Mapping[str, Any], folder: str) -> Iterator[list[str]]:
    arms = {arm["name"]: arm for arm in report["arms"]}
    off = arms["off"]["summary"]
    for row in report["comparisons"]:
        if row["speed"] is None:
            yield [configuration.name, "failed", "", "", "", ""]
            continue
        on = arms[row["arm"]]["summary"]
        speed, memory = (interval(each["ratio"], each["low"], each["high"]) for each in (row["speed"], row["memory"]))
        yield [
            f"[{configuration.name}]({folder}/{configuration.name}/report.md): {configuration.about}",
            *(f"{each['step_seconds'] * 1e3:,.0f} ms" for each in (off, on)),
            speed,
            f"{size(off['peak_memory_bytes'])} to {size(on['peak_memory_bytes'])}, {memory}",
            row["loss"]["verdict"],
        ]


if __name__ == "__main__":
    sys.exit(main())
