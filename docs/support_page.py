"""docs/support.md: features by release of Megatron-core, what each was trained on, operators and their backends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

DOCS = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature

# What has been shown of a backend, so that its place in a table claims no more.
STANDING = {
    "reference": "plain PyTorch, the definition; run by the tests",
    "cpu": "run by the tests, forward and every gradient",
    "cuda": "not yet run in this release's tests",
    "npu": "call sites checked against the real torch_npu wheel and an emulation (docs/npu.md); not run on a device",
}


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; `|` inside a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def page_link(feature: Feature, folder: str) -> str:
    return f"[{feature.name}]({folder}features/{feature.name}.md)"


def _summary(operator: str) -> str:
    """The first line of an operator's docstring."""
    import importlib

    from mindspeed_lite.ops.dispatch import OPERATORS

    return (importlib.import_module(OPERATORS[operator]).__doc__ or "").partition("\n")[0]


def _mark(feature: Feature, release: str, verified: bool, ran: Mapping[str, Any], notes: dict[str, int]) -> str:
    """What the table of releases says of one feature; reasons are numbered in `notes`."""
    from tests.harness import on_and_off

    row = ran.get(release, {}).get(feature.name, {})
    lacking = "; ".join(feature.patches_for(release)[1])
    layout = row.get("layout")
    idle = layout is not None and layout != on_and_off.layout_of(feature)
    note = lacking or row.get("reason") or row.get("fault") or ""
    if not note and idle:
        note = f"trained in the layout `{layout}` alone, where it has nothing to do"
    number = f" ({notes.setdefault(note, len(notes) + 1)})" if note else ""
    if lacking:
        return f"no{number}"
    if row.get("fault"):
        return f"fails{number}"
    if layout is not None and not idle:
        return "trained"
    return f"{'read' if verified or not feature.patches else 'not read'}{number}"


def _when(rows: Mapping[str, Any]) -> tuple[str, str]:
    """The days and commits that rows were made on."""
    found = [row for row in rows.values() if "date" in row]
    days, commits = (sorted({row[name] for row in found}) for name in ("date", "commit"))
    return " to ".join(dict.fromkeys((days[0], days[-1]))), ", ".join(commits)


def _scripts(ran: Mapping[str, Any]) -> list[str]:
    """The table of Megatron's own scripts: a row for each tag, a column for each layout."""
    layouts = list(dict.fromkeys(layout for rows in ran.values() for layout in rows))

    def cell(row: Mapping[str, Any]) -> str:
        return row.get("fault") or f"{row['drift']:.1e} ({row['on']})" if row else "not run"

    rows = [
        (f"`{tag}`", *(cell(rows.get(layout, {})) for layout in layouts), _when(rows)[0]) for tag, rows in ran.items()
    ]
    return table(("Tag", *(f"`{layout}`" for layout in layouts), "Trained on"), rows)


def _environments(ran: Mapping[str, Any]) -> list[str]:
    """The part on Python and torch; nothing where none was tried."""
    rows = [
        (
            name,
            release,
            f"{row['features']} of {row['of']}",
            f"{row['operators']} of {row['checks']}",
            f"{row['drift']:.1e}",
            row["date"],
        )
        for name, rows in ran.items()
        for release, row in rows.items()
    ]
    if not rows:
        return []
    headers = ("Environment", "Megatron-core", "Features trained", "Operators' checks", "Largest drift", "Trained on")
    return [
        "## Python and torch",
        "",
        "Features trained off and on, and every operator checked against float64, on CPU (`make matrix-python`).",
        "",
        *table(headers, rows),
        "",
    ]


def support() -> str:
    """docs/support.md: features by release and backend, operators, and what has been shown of each backend."""
    from packaging.version import Version

    from mindspeed_lite import runtime
    from mindspeed_lite.cli.features import verified_releases
    from mindspeed_lite.ops.dispatch import OPERATORS, REFERENCE, operator

    known = runtime.fingerprints()
    ran = json.loads((DOCS / "matrix.json").read_text(encoding="utf-8"))
    releases = sorted(known.entries, key=Version)
    notes: dict[str, int] = {}
    backends = {name: (REFERENCE, *operator(name).backends) for name in OPERATORS}
    features = []
    for feature in runtime.catalogue():
        verified = verified_releases(feature, known)
        marks = [_mark(feature, release, release in verified, ran["releases"], notes) for release in releases]
        features.append((page_link(feature, ""), *marks))
    uses = {name: [page_link(each, "") for each in runtime.catalogue() if name in each.operators] for name in OPERATORS}
    operators = [(f"`{name}`", _summary(name), ", ".join(backends[name]), ", ".join(uses[name])) for name in OPERATORS]
    standing = dict.fromkeys(backend for each in backends.values() for backend in each)
    lines = [
        "# Support",
        "",
        "Written by `python docs/generate.py` from the features' declarations, the operators' folders,",
        "`patches/fingerprints.json` and `docs/matrix.json`, which `make matrix` writes by training.",
        "",
        "## Features by release of Megatron-core",
        "",
        *table(("Feature", *releases), features),
        "",
        "*trained*: trained on this release with the feature and without it, on CPU; losses agree within its class, to",
        "the bit where that is bitwise. *read*: what the feature swaps has been read in this release and its",
        "fingerprint is known; it was not trained, or not where it has something to do. Another patch release of the",
        "same series counts as both if its source is the same. *no*: the release lacks what the feature stands on, and",
        "it is left off with that reason. What happens otherwise:",
        "[writing a patch](writing-a-patch.md#versions-and-fingerprints).",
        "",
        *(f"{number}. {note}" for note, number in notes.items()),
        "",
        *table(("Release", "Trained on", "Commits"), [(name, *_when(rows)) for name, rows in ran["releases"].items()]),
        "",
        "With the torch and Python that development is pinned to. A release named `.dev0` is the newest commit of",
        "Megatron-LM's main branch on that date.",
        "",
        "## Megatron's own script by tag",
        "",
        "`pretrain_gpt.py` of a checkout of each tag, with the import line alone and with `--mindspeed-lite-auto`: two",
        "layers of size 64 in bf16, three steps, on CPU (`python -m tools.matrix_scripts`). Cells: the largest",
        "relative distance of two losses of one step, and how many features were on. Every feature that auto leaves",
        "off has a reason.",
        "",
        *_scripts(ran.get("scripts", {})),
        "",
        *_environments(ran.get("environments", {})),
        "## Operators",
        "",
        *table(("Operator", "What it is", "Backends", "Features"), operators),
        "",
        "## Backends",
        "",
        *table(("Backend", "Standing"), [(backend, STANDING[backend]) for backend in standing]),
        "",
        "The device of the tensors chooses the backend; what it cannot do runs on the reference, and the reason is",
        "logged once. `mindspeed-lite doctor` shows which backends are usable on your machine.",
    ]
    return "\n".join(lines) + "\n"
