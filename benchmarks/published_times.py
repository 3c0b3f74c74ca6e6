"""Predicted and published step time of trainings on clusters: `python -m benchmarks.published_times [--page FILE]`.

Reads tests/data/published.jsonl, or a file of `--data` with rows of the same kind. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Columns, table
from mindspeed_lite.bench.plots import COLORS, WIDTH, style
from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.planner import ArgumentError, arguments, choose_device, orders, step_time
from mindspeed_lite.planner.step_time import StepTime

DATA = ROOT / "tests" / "data" / "published.jsonl"


@dataclass(frozen=True)
class Published:
    """A published training and its predicted step."""

    row: dict[str, Any]
    step: StepTime

    @property
    def error(self) -> float:
        return float(self.step.seconds / self.row["step_s"] - 1)

    @property
    def kind(self) -> str:
        return "mixtures of experts" if "--num-experts" in _words(self.row) else "dense"


def _words(row: dict[str, Any]) -> list[str]:
    return shlex.split(row["flags"]) if isinstance(row["flags"], str) else list(row["flags"])


def _variants(row: dict[str, Any]) -> Iterator[list[str]]:
    """The command; where micro-batch and virtual stages are unpublished, each choice of them."""
    words = _words(row)
    yield words
    if not row.get("unpublished", row.get("micro_batch_and_vpp_unpublished")):
        return
    place = words.index("--micro-batch-size") + 1
    for micro in ("1", "2", "4"):
        for chunks in range(1, 9):
            ends = ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
            virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
            for more in ([], ends):
                yield [*words[:place], micro, *words[place + 1 :], *virtual, *more]


def predict(row: dict[str, Any]) -> Published:
    """Of the fastest variant. Raises ArgumentError."""
    pricer, kind = choose_device.pricer_of(row["device"], None)
    vocabulary = row.get("vocabulary", row.get("padded_vocab_size", 0))
    found: list[StepTime] = []
    problem: ArgumentError | None = None
    for words in _variants(row):
        try:
            training = arguments.read(words, row["devices"], kind, vocabulary)
            orders.chunks_of_ranks(training)
        except ArgumentError as error:
            problem = problem or error
            continue
        found.append(step_time.step(training.replace(expert_load=step_time.IMBALANCE), pricer))
    if not found:
        assert problem is not None
        raise problem
    return Published(row, min(found, key=lambda step: step.seconds))


def read(file: Path = DATA) -> list[Published]:
    return [predict(json.loads(line)) for line in file.read_text().splitlines()]


def mean(found: Sequence[Published]) -> float:
    return statistics.mean(abs(each.error) for each in found)


def groups(found: Sequence[Published]) -> dict[str, list[Published]]:
    """All, and by kind and device."""
    several: dict[str, list[Published]] = {"all": list(found)}
    for each in found:
        several.setdefault(each.kind, []).append(each)
    for each in found:
        several.setdefault(f"{each.row['device']}, {each.kind}", []).append(each)
    return several


_GROUPS: Columns = {
    "Trainings": lambda row: row["name"],
    "number": lambda row: str(len(row["members"])),
    "mean error": lambda row: f"{mean(row['members']):.1%}",
    "median": lambda row: f"{statistics.median(abs(each.error) for each in row['members']):.1%}",
    "bias": lambda row: f"{statistics.mean(each.error for each in row['members']):+.1%}",
}
_TRAININGS: Columns = {
    "Training": lambda row: row["model"] + (f" ({row['note']})" if row.get("note") else ""),
    "device": lambda row: row["device"],
    "devices": lambda row: f"{row['devices']:,}",
    "published": lambda row: seconds(row["step_s"]),
    "predicted": lambda row: seconds(row["found"].step.seconds),
    "error": lambda row: f"{row['found'].error:+.1%}",
}


def _page(found: Sequence[Published]) -> str:
    return "\n".join(
        [
            *table(_GROUPS, [{"name": name, "members": members} for name, members in groups(found).items()]),
            "",
            "Trainings that are more than 10 % off:",
            "",
            *table(_TRAININGS, [{**each.row, "found": each} for each in found if abs(each.error) > 0.1]),
        ]
    )


def _plot(found: Sequence[Published], file: Path) -> None:
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
        axes = figure.subplots()
        for color, device in zip(COLORS, dict.fromkeys(each.row["device"] for each in found), strict=False):
            for marker, kind in (("o", "dense"), ("^", "mixtures of experts")):
                members = [each for each in found if each.row["device"] == device and each.kind == kind]
                if members:
                    measured = [each.row["step_s"] for each in members]
                    label = f"{device}, {kind}: {mean(members):.1%}"
                    predicted = [each.step.seconds for each in members]
                    axes.plot(measured, predicted, marker, color=color, alpha=0.7, label=label)
        ends = [0.3, 500.0]
        axes.plot(ends, ends, color="gray", linewidth=1)
        axes.fill_between(ends, [0.8 * each for each in ends], [1.2 * each for each in ends], color="gray", alpha=0.15)
        axes.set(xscale="log", yscale="log", xlabel="published seconds of a step", ylabel="predicted seconds of a step")
        ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{each:g}" for each in ticks])
            axis.set_ticks([], minor=True)
        axes.legend(title="mean error; the band is 20 %")
        figure.savefig(file, dpi=110)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_times", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--data", type=Path, default=DATA, help="default: %(default)s")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page whose tables are replaced, and its picture")
    options = parser.parse_args(given)
    found = read(options.data)
    text = _page(found)
    print(text)
    if options.page is not None:
        before, mark, _ = options.page.read_text().partition("<!-- generated -->\n")
        options.page.write_text(f"{before}{mark}\n{text}\n")
        _plot(found, options.page.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
