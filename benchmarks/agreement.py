"""Compares losses with features on and off on real text, each feature in the layout that the tests train it in.

A feature holds if its losses stay within the rounding baseline: the largest distance from off, up to each step, of
three trainings whose initial weights were moved by one rounding each. Rows are kept as JSON next to the page, which
shows all of them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Options, Row
from mindspeed_lite import runtime
from tests.harness import checkouts, on_and_off
from tests.harness.feature_layouts import LAYOUTS
from tests.harness.on_and_off import Outcome
from tests.harness.rows import options_of
from tests.harness.training import Trainer

NUDGES = (1, 2, 3)
ALL = "all"
FEATURES = [each.name for each in runtime.catalogue()]


def _losses(history: Sequence[tuple[str, str]]) -> list[float]:
    return [float.fromhex(loss) for loss, _ in history]


def _of_release(options: Options, release: str, text: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(checkouts.folder(release), Path(scratch), training=False)
        for layout, names in on_and_off.layouts(release).items():
            chosen = [each for each in names if options.features == [ALL] or each in options.features]
            if not chosen:
                continue
            # Choices of experts flip where two are nearly as good: at the rate of the others, two trainings are soon as
            # far apart as any two.
            model = {"text": text, "lr": 3e-4 if "experts" in options_of(LAYOUTS[layout]) else 1e-3}
            nudged: list[list[float]] = []
            for name in chosen:
                outcome = on_and_off.train(trainer, layout, name, steps=options.steps, options=model)
                if outcome.error:
                    raise SystemExit(f"{release} {layout} {name}: {outcome.error}")
                if outcome.on != outcome.off and not nudged:
                    runs = [{**model, "steps": options.steps, "nudge": seed} for seed in NUDGES]
                    nudged = [_losses(on_and_off.reference(trainer, layout, each)) for each in runs]
                yield {"release": release, "layout": layout, "features": name, "steps": options.steps,
                       **_compared(outcome, nudged)}  # fmt: skip
        trainer.close()


def _compared(outcome: Outcome, nudged: Sequence[Sequence[float]]) -> Row:
    """Largest relative distances, and the worst share of the baseline's largest distance up to that step."""
    off, on = _losses(outcome.off), _losses(outcome.on)
    ends = {"first": off[0], "last": off[-1], "on": on[-1]}
    if outcome.on == outcome.off:
        return {**ends, "distance": None, "baseline": None, "share": 0.0}
    marks = [max(abs(a - b) / a for b in others) for a, *others in zip(off, *nudged, strict=True)]
    distances = [abs(a - b) / a for a, b in zip(off, on, strict=True)]
    # In the first steps both are the noise of one rounding.
    share = max(each / max(*marks[: index + 1], 2.0**-12) for index, each in enumerate(distances))
    return {**ends, "distance": max(distances), "baseline": max(marks), "share": share}


def _measure(options: Options) -> list[Row]:
    kept = options.page.with_suffix(".json") if options.page is not None else None
    rows = {_key(row): row for row in json.loads(kept.read_text())} if kept is not None and kept.is_file() else {}
    # English prose that every machine has: the help texts of Python's standard library.
    spec = importlib.util.find_spec("pydoc_data.topics")
    assert spec is not None and spec.origin is not None
    for release in options.releases:
        for row in _of_release(options, release, spec.origin):
            print(row, flush=True)
            rows[_key(row)] = row
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in rows.values()) + "\n]\n")
    return worst([*rows.values()])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("release", "layout", "features", "steps"))


def worst(rows: list[Row]) -> list[Row]:
    """One row for each feature and length of training: the worst of its layouts and releases, which it lists."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["features"], row["steps"]), []).append(row)
    return [
        {
            **max(found, key=lambda row: float(row["share"])),
            "layouts": [*dict.fromkeys(row["layout"] for row in found)],
            "releases": sorted({row["release"] for row in found}),
        }
        for found in groups.values()
    ]


def _share(row: Row) -> str:
    """Rounded up: what is beyond the baseline must not read as if it were within."""
    if row["distance"] is None:
        return ""
    return f"{math.ceil(100 * row['share']) / 100:.2f} ({row['layout']}, {row['release']})"


BENCHMARK = Benchmark(
    name="agreement",
    title="Losses on against off",
    about="Small models train on the help texts of Python's standard library, one token per byte, in bf16; the "
    "baseline is the largest distance from off, up to each step, of three trainings whose initial weights were moved "
    "by one rounding each. Of each feature the worst training is shown: a share up to 1 is within the baseline.",
    columns={
        "feature": lambda row: row["features"],
        "steps": lambda row: str(row["steps"]),
        "layouts": lambda row: ", ".join(row["layouts"]),
        "Megatron": lambda row: ", ".join(row["releases"]),
        "distance": lambda row: "bitwise" if row["distance"] is None else f"{row['distance']:.1e}",
        "baseline": lambda row: "" if row["distance"] is None else f"{row['baseline']:.1e}",
        "share": _share,
    },
    measure=_measure,
    options={"steps": 100, "releases": ["0.17.1", "0.19.2"], "features": [ALL]},
    tiny={"steps": 3, "releases": ["0.19.2"], "features": ["use_fused_rmsnorm", "use_fused_embedding"]},
    choices={"releases": checkouts.ALL, "features": [ALL, *FEATURES]},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
