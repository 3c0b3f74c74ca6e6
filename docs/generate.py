"""Writes what the docs say about every feature from the features' own declarations, for whoever changes one.

python docs/generate.py            writes docs/support.md and the flags table of README.md
python docs/generate.py --check    writes nothing; exits with 1 if one of them is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature, Option

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


def flags() -> list[str]:
    """README's table: our general flags, then those of the features."""
    from mindspeed_lite import activation

    rows = [(_flag(option), "general", option.help) for option in activation.GENERAL]
    for feature in activation.catalogue():
        rows += [(_flag(option), _page(feature, "docs/"), option.help) for option in feature.options]
    return table(("Flag", "Belongs to", "What it does"), rows)


def support() -> str:
    """docs/support.md: features by release and backend, and what has been shown of each backend."""
    from packaging.version import Version

    from mindspeed_lite import activation
    from mindspeed_lite.cli.features import verified_releases
    from mindspeed_lite.ops.dispatch import OPERATORS, REFERENCE, operator

    known = activation.fingerprints()
    releases = sorted(known.entries, key=Version)
    backends = {name: (REFERENCE, *operator(name).backends) for name in OPERATORS}
    features = []
    for feature in activation.catalogue():
        verified = verified_releases(feature, known)
        backed = [f"`{name}`: {', '.join(backends[name])}" for name in feature.operators]
        marks = ["verified" if release in verified else "not verified" for release in releases]
        features.append((_page(feature, ""), feature.numerics, *marks, "; ".join(backed) or "no operator"))
    standing = dict.fromkeys(backend for each in backends.values() for backend in each)
    lines = [
        "# Support",
        "",
        "Written by `python docs/generate.py` from the features' declarations and `patches/fingerprints.json`.",
        "",
        "## Features by release of Megatron-core",
        "",
        *table(("Feature", "Numerics", *releases, "Operators and their backends"), features),
        "",
        "*verified*: what the feature swaps has been read in this release and its fingerprint is known. Another patch",
        "release of the same series counts as verified if its source is the same. What happens otherwise:",
        "[writing a patch](writing-a-patch.md#versions-and-fingerprints).",
        "",
        "## Backends",
        "",
        *table(("Backend", "Standing"), [(backend, STANDING[backend]) for backend in standing]),
        "",
        "The device of the tensors chooses the backend; what it cannot do runs on the reference, and the reason is",
        "said once. `mindspeed-lite features` shows which backends are usable on your machine.",
    ]
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """README's text with the flags table between its markers renewed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has lost its markers {BEGIN} and {END}")
    return "\n".join([before + BEGIN, *flags(), END + after])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    check = parser.parse_args(arguments).check
    sys.path.insert(0, str(ROOT))
    front = ROOT / "README.md"
    pages = {ROOT / "docs" / "support.md": support(), front: readme(front.read_text(encoding="utf-8"))}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is out of date: run `python docs/generate.py`", file=sys.stderr)
        else:
            path.write_text(pages[path], encoding="utf-8")
            print(f"{name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
