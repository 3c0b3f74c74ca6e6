"""Draws README's picture from the committed reports: step time and peak memory, features off and on.

python docs/picture.py        writes docs/benchmarks/results.png; needs the extra `bench`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "benchmarks" / "cpu"
PICTURE = ROOT / "docs" / "benchmarks" / "results.png"
# In the order of the page; the text is what a reader sees beside the bars.
TRAININGS = {
    "dense-medium": "dense, 4 layers, sequence 1024",
    "long": "dense, 2 layers, sequence 4096",
    "moe-small": "8 experts, expert parallel 2",
    "dense-small-tp2-sp": "dense, tensor parallel 2",
}


def results() -> list[dict[str, float | str]]:
    """For each training: median step in seconds and peak memory in bytes, off and on, and the ratios' intervals."""
    rows: list[dict[str, float | str]] = []
    for name in TRAININGS:
        report = json.loads((REPORTS / name / "report.json").read_text(encoding="utf-8"))
        comparison = report["comparisons"][0]
        arms = {arm["name"]: arm["summary"] for arm in report["arms"]}
        off, on = arms["off"], arms[comparison["arm"]]
        row: dict[str, float | str] = {"name": name, "device": report["environment"]["device"]}
        row |= {"loss": comparison["loss"]["verdict"]}
        for key, source in (("seconds", "step_seconds"), ("bytes", "peak_memory_bytes")):
            row |= {f"{key}_off": off[source], f"{key}_on": on[source]}
        for key in ("speed", "memory"):
            row |= {f"{key}_{part}": comparison[key][part] for part in ("ratio", "low", "high")}
        rows.append(row)
    return rows


def main() -> int:
    from matplotlib.figure import Figure

    rows = results()
    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, title, key, ratio, unit in (
        (panels[0], "Step time (s)", "seconds", "speed", 1.0),
        (panels[1], "Peak memory (GB)", "bytes", "memory", 1e9),
    ):
        for place, row in enumerate(rows):
            off, on = float(row[f"{key}_off"]) / unit, float(row[f"{key}_on"]) / unit
            axes.barh(place - 0.2, off, height=0.36, color="#b8bcc4", label="features off" if not place else None)
            axes.barh(place + 0.2, on, height=0.36, color="#0072b2", label="features on" if not place else None)
            text = (
                f"{float(row['speed_ratio']):.2f}x as fast"
                if ratio == "speed"
                else f"{1 - float(row['memory_ratio']):.0%} less"
            )
            axes.text(on, place + 0.2, f" {text}", va="center", ha="left", fontsize=9, color="#0072b2", weight="bold")
        axes.set_yticks(range(len(rows)), list(TRAININGS.values()) if axes is panels[0] else [""] * len(rows))
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.12)
    panels[1].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(PICTURE, metadata={"Software": None})
    print(f"{PICTURE.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
