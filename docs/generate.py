"""Writes what the docs say of features, operators and defaults from their declarations.

python docs/generate.py            writes docs/support.md, the list that `mindspeed-lite features` reads, and the marked
                                   parts of README.md and of the pages in docs/
python docs/generate.py --check    writes nothing; exits with 1 if one of them is out of date

A marked part stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; a feature's page gets one at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature, Option

THEMES = {
    "operators": "Fused operators",
    "experts": "Mixture of experts",
    "memory": "Memory",
    "communication": "Communication",
}

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


def _flag(option: Option) -> str:
    return f"`{option.flag}`" if option.is_switch else f"`{option.flag} {option.metavar or option.dest.upper()}`"


def _page(feature: Feature, folder: str) -> str:
    return f"[{feature.name}]({folder}features/{feature.name}.md)"


def by_theme() -> dict[str, list[Feature]]:
    """Every feature under the heading of its theme."""
    from mindspeed_lite import runtime

    found: dict[str, list[Feature]] = {heading: [] for heading in THEMES.values()}
    for feature in runtime.catalogue():
        found[THEMES[feature.theme]].append(feature)
    return found


def flags() -> list[str]:
    """README's table: our general flags, then those of the features, theme by theme."""
    from mindspeed_lite import runtime

    rows = [(_flag(option), "general", option.help) for option in runtime.GENERAL]
    for features in by_theme().values():
        for feature in features:
            rows += [(_flag(option), _page(feature, "docs/"), option.help) for option in feature.options]
    return table(("Flag", "Belongs to", "What it does"), rows)


def index() -> list[str]:
    """The index's table of features."""
    rows = [(heading, ", ".join(_page(each, "") for each in found)) for heading, found in by_theme().items()]
    return table(("Features", "Their pages"), rows)


def defaults() -> list[str]:
    """The table of Megatron's defaults that are switched."""
    from mindspeed_lite.patches._shared.megatron_defaults import DEFAULTS

    rows = {}
    for each in DEFAULTS:
        stand_in = each.stand_in.removeprefix("use_")
        beside = f"; not with [`--{stand_in.replace('_', '-')}`](features/{stand_in}.md)" if stand_in else ""
        rows[each.flag] = (f"`{each.flag}`", each.needs, each.when + beside)
    return table(("As if you had written", "Megatron's default needs", "Switched when"), rows.values())


def declaration(feature: Feature) -> list[str]:
    """What a feature's page says of its flags, targets and relations."""
    from mindspeed_lite.engine import Provide

    options = [
        (_flag(option), {False: "off", None: "none"}.get(option.default, f"`{option.default}`"), option.help)
        for option in feature.options
    ]
    targets = [
        (
            patch.kind,
            f"`{patch.target}`",
            patch.versions or "all",
            "" if isinstance(patch, Provide) else ", ".join(f"`{each.rpartition(':')[2]}`" for each in patch.reads),
        )
        for patch in feature.patches
    ]
    facts = [("Numerics", feature.numerics), ("Operators", ", ".join(f"`{each}`" for each in feature.operators))]
    facts += [("Requires", f"[{each.feature}]({each.feature}.md): {each.reason}") for each in feature.requires]
    facts += [("Conflicts with", f"[{each.feature}]({each.feature}.md): {each.reason}") for each in feature.conflicts]
    facts += [("Skipped with", f"`{name}`: {why}") for name, why in feature.conflicting_args.items()]
    facts += [
        ("Left off by auto", feature.not_auto),
        ("Memory", feature.memory or "predicted by `mindspeed-lite memory`"),
    ]
    lines = ["## Declaration", "", *table(("Flag", "Default", "What it does"), options), ""]
    if targets:
        lines += [*table(("Kind", "Target", "Releases", "Reads"), targets), ""]
    return lines + table(("", ""), [(name, text) for name, text in facts if text])


def _summary(operator: str) -> str:
    """The first line of an operator's docstring."""
    import importlib

    from mindspeed_lite.ops.dispatch import OPERATORS

    return (importlib.import_module(OPERATORS[operator]).__doc__ or "").partition("\n")[0]


def support() -> str:
    """docs/support.md: features by release and backend, operators, and what has been shown of each backend."""
    from packaging.version import Version

    from mindspeed_lite import runtime
    from mindspeed_lite.cli.features import verified_releases
    from mindspeed_lite.ops.dispatch import OPERATORS, REFERENCE, operator

    known = runtime.fingerprints()
    releases = sorted(known.entries, key=Version)
    backends = {name: (REFERENCE, *operator(name).backends) for name in OPERATORS}
    features = []
    for feature in runtime.catalogue():
        verified = verified_releases(feature, known)
        backed = [f"`{name}`: {', '.join(backends[name])}" for name in feature.operators]
        marks = ["verified" if release in verified else "not verified" for release in releases]
        features.append((_page(feature, ""), feature.numerics, *marks, "; ".join(backed) or "no operator"))
    tables = [(f"`{name}`", _summary(name), ", ".join(backends[name])) for name in OPERATORS]
    standing = dict.fromkeys(backend for each in backends.values() for backend in each)
    lines = [
        "# Support",
        "",
        "Written by `python docs/generate.py` from the features' declarations, the operators' folders and",
        "`patches/fingerprints.json`.",
        "",
        "## Features by release of Megatron-core",
        "",
        *table(("Feature", "Numerics", *releases, "Operators and their backends"), features),
        "",
        "*verified*: what the feature swaps has been read in this release and its fingerprint is known. Another patch",
        "release of the same series counts as verified if its source is the same. What happens otherwise:",
        "[writing a patch](writing-a-patch.md#versions-and-fingerprints).",
        "",
        "## Operators",
        "",
        *table(("Operator", "What it is", "Backends"), tables),
        "",
        "## Backends",
        "",
        *table(("Backend", "Standing"), [(backend, STANDING[backend]) for backend in standing]),
        "",
        "The device of the tensors chooses the backend; what it cannot do runs on the reference, and the reason is",
        "said once. `mindspeed-lite doctor` shows which backends are usable on your machine.",
    ]
    return "\n".join(lines) + "\n"


def with_part(path: Path, name: str, lines: Sequence[str], append: bool = False) -> str:
    """A page's text with the part between its markers renewed; with `append` the part is made at the end."""
    text = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if append and begin not in text:
        text = f"{text.rstrip()}\n\n{begin}\n{end}\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{path.relative_to(ROOT)} has lost its markers {begin} and {end}")
    return "\n".join([before + begin, *lines, end + after])


def pages() -> dict[Path, str]:
    """Every page that is generated, whole or in part."""
    from mindspeed_lite import runtime
    from mindspeed_lite.cli import features as listing

    front, first, switched = ROOT / "README.md", DOCS / "index.md", DOCS / "defaults.md"
    found = {
        listing.INDEX: json.dumps(listing.describe_all(), indent=1) + "\n",
        DOCS / "support.md": support(),
        front: with_part(front, "flags", flags()),
        first: with_part(first, "features", index()),
        switched: with_part(switched, "defaults", defaults()),
    }
    for feature in runtime.catalogue():
        page = DOCS / "features" / f"{feature.name}.md"
        if page.is_file():
            found[page] = with_part(page, "declaration", declaration(feature), append=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    check = parser.parse_args(arguments).check
    sys.path.insert(0, str(ROOT))
    written = pages()
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is out of date: run `python docs/generate.py`", file=sys.stderr)
        else:
            path.write_text(written[path], encoding="utf-8")
            print(f"{name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
