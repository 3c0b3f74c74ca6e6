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
    "cuda": "[run on one H100](benchmarks/gpu/h100.md), some as earlier kernels; not run by `make test`",
    "npu": "call sites checked against the real torch_npu wheel and an emulation ([how](npu.md)); not run on a device",
}


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; `|` inside a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def page_link(feature: Feature, folder: str) -> str:
    return f"[{feature.name}]({folder}features/{feature.name}.md)"


def _mark(feature: Feature, release: str, verified: bool, ran: Mapping[str, Any]) -> tuple[str, str]:
    """What is known of a feature in a release, of trained, read, not read, fails and no; and the reason if any."""
    from tests.harness import on_and_off

    row = ran.get(release, {}).get(feature.name, {})
    lacking = "; ".join(feature.patches_for(release)[1])
    layout = row.get("layout")
    idle = layout is not None and layout != on_and_off.layout_of(feature)
    if lacking:
        return "no", lacking
    if row.get("fault"):
        return "fails", row["fault"]
    if layout is not None and not idle:
        return "trained", ""
    reason = row.get("reason") or (
        f"trained in the layout `{layout}` alone, where it has nothing to do" if idle else ""
    )
    return ("read" if verified or not feature.patches else "not read"), reason


def _span(found: Sequence[str], releases: Sequence[str]) -> str:
    """Some of the releases in few words."""
    first, last = releases.index(found[0]), releases.index(found[-1])
    if list(found) != list(releases[first : last + 1]) or len(found) == 1:
        return ", ".join(found)
    if len(found) == len(releases):
        return "all"
    return f"{found[0]} and later" if last == len(releases) - 1 else f"{found[0]} to {found[-1]}"


def _standing(feature: Feature, releases: Sequence[str], known: Any, ran: Mapping[str, Any]) -> list[str]:
    """A row: the feature, where it was trained, and for other releases what is known and why."""
    from mindspeed_lite.cli.features import verified_releases

    verified = verified_releases(feature, known)
    marks: dict[tuple[str, str], list[str]] = {}
    for release in releases:
        marks.setdefault(_mark(feature, release, release in verified, ran), []).append(release)
    trained = marks.pop(("trained", ""), [])
    # The feature's page has the reasons of its declaration.
    declared = {*feature.unsupported.values(), ""}
    others = [
        f"{mark} on {_span(found, releases)}" + (f": {reason}" if reason not in declared else "")
        for (mark, reason), found in marks.items()
    ]
    return [page_link(feature, ""), _span(trained, releases) if trained else "", "; ".join(others)]


def transformer_engine() -> dict[str, tuple[bool, str]]:
    """Feature -> whether it trains with Transformer Engine's layers, and what those do instead."""
    from mindspeed_lite import runtime
    from tests.harness.feature_layouts import LAYOUTS
    from tests.te_contract.table import own_reasons

    found = {}
    for feature in runtime.catalogue():
        reasons = [own_reasons(feature.name, layout) for layout in LAYOUTS]
        text = "; ".join(dict.fromkeys(why.partition("transformer_engine ")[2] for each in reasons for why in each))
        found[feature.name] = (not all(reasons), f"it {text}" if text else "")
    return found


def _when(rows: Mapping[str, Any]) -> str:
    """The days that rows were made on."""
    days = sorted({row["date"] for row in rows.values() if "date" in row})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def _scripts(ran: Mapping[str, Any]) -> list[str]:
    """The table of Megatron's own scripts: a row for each tag, with the layout of the largest distance."""
    rows = []
    for tag, found in ran.items():
        faults = [f"`{layout}`: {row['fault']}" for layout, row in found.items() if row.get("fault")]
        sound = sorted((row["drift"], layout, row["on"]) for layout, row in found.items() if not row.get("fault"))
        drift = [f"{drift:.1e} (`{layout}`)" for drift, layout, _ in sound[-1:]]
        on = " to ".join(str(each(count for _, _, count in sound)) for each in (min, max) if sound)
        rows.append((f"`{tag}`", "; ".join([*drift, *faults]), on, _when(found)))
    return table(("Tag", "Largest distance", "Features on", "Trained on"), rows)


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


def _batch_dependence(operator: Any, reasons: list[str]) -> str:
    """Backends whose rows depend on their batch, with numbers of `reasons`, to which new ones are added."""
    if not operator.batch_dependence:
        return "no rows"
    found = []
    for backend, why in operator.batch_dependence.items():
        if why:
            reasons += [] if why in reasons else [why]
            name = "reference on devices" if backend == "reference" else backend
            found.append(f"{name} ({reasons.index(why) + 1})")
    return ", ".join(found) or "none"


def support() -> str:
    """docs/support.md: features by release and backend, operators, and what has been shown of each backend."""
    from packaging.version import Version

    from mindspeed_lite import runtime
    from mindspeed_lite.cli.features import why_not_in_graphs
    from mindspeed_lite.ops.dispatch import OPERATORS, REFERENCE, operator

    known, engine = runtime.fingerprints(), transformer_engine()
    ran = json.loads((DOCS / "matrix.json").read_text(encoding="utf-8"))
    releases, scripts = sorted(known.entries, key=Version), ran.get("scripts", {})
    backends = {name: (REFERENCE, *operator(name).backends) for name in OPERATORS}
    features = [_standing(feature, releases, known, ran["releases"]) for feature in runtime.catalogue()]
    uses = {name: [page_link(each, "") for each in runtime.catalogue() if name in each.operators] for name in OPERATORS}
    reasons: list[str] = []
    operators = [
        (
            f"`{name}`",
            ", ".join(backends[name]),
            _batch_dependence(operator(name), reasons),
            ", ".join(uses[name]),
        )
        for name in OPERATORS
    ]
    standing = dict.fromkeys(backend for each in backends.values() for backend in each)
    uncaptured: dict[str, list[str]] = {}
    for each in runtime.catalogue():
        if why := why_not_in_graphs(each):
            uncaptured.setdefault(why, []).append(page_link(each, ""))
    days: dict[str, list[str]] = {}
    for name, rows in ran["releases"].items():
        days.setdefault(_when(rows), []).append(name)
    lines = [
        "# Support",
        "",
        "Written by `python docs/generate.py` from the features' declarations, the operators' folders,",
        "`patches/fingerprints.json` and `docs/matrix.json`, which `make matrix` writes by training.",
        "",
        "## Features by release of Megatron-core",
        "",
        f"Of {', '.join(releases)}; `.dev0` is the newest commit of Megatron-LM's main branch on that date.",
        "",
        *table(("Feature", "Trained on", "Other releases"), features),
        "",
        "*trained*: off and on, on CPU; losses agree within the feature's class. *read*: the fingerprint of what it",
        "swaps is known, and it was not trained there. *no*: the release lacks what the feature needs; the feature's",
        "page has the reason. Patch releases with the same source count alike. Other releases:",
        "[writing a patch](writing-a-patch.md#versions-and-fingerprints).",
        "",
        *(f"Trained {when}: {', '.join(names)}." for when, names in days.items()),
        "",
        "## CUDA graphs",
        "",
        "With `--cuda-graph-impl`, `--enable-cuda-graph` or `--external-cuda-graph` these are skipped, with their",
        "reason. The others stay on: in their training on CPU none of their code reads from the device. None was",
        "captured on a device.",
        "",
        *table(
            ("Why it cannot be captured", "Features"), [(why, ", ".join(names)) for why, names in uncaptured.items()]
        ),
        "",
        "## With Transformer Engine",
        "",
        f"{sum(trains for trains, _ in engine.values())} of {len(engine)} features train with its layers (a stand-in",
        "on CPU): [the table](guides/from-transformer-engine.md).",
        "",
        "## Megatron's own script by tag",
        "",
        "`pretrain_gpt.py` of each tag with the import line alone and with `--mindspeed-lite-auto`, three steps on",
        "CPU (`python -m tools.matrix --scripts`): the largest relative distance of two losses, in",
        f"{', '.join(f'`{each}`' for each in dict.fromkeys(layout for rows in scripts.values() for layout in rows))}.",
        "",
        *_scripts(scripts),
        "",
        *_environments(ran.get("environments", {})),
        "## Operators",
        "",
        *table(("Operator", "Backends", "Rows depend on their batch", "Features"), operators),
        "",
        "[`--batch-invariant`](features/batch_invariant.md) refuses backends in which a row's bits depend on the other",
        "rows or on their number. What CUDA backends do follows from their kernels, and was not run. Reasons:",
        "",
        *(f"{number}. {why}" for number, why in enumerate(reasons, 1)),
        "",
        "## Backends",
        "",
        *table(("Backend", "Standing"), [(backend, STANDING[backend]) for backend in standing]),
        "",
        "The device of the tensors chooses the backend; what it cannot do runs on the reference, and the reason is",
        "logged once. `mindspeed-lite doctor` shows which backends are usable on your machine.",
    ]
    return "\n".join(lines) + "\n"
