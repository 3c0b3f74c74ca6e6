"""`mindspeed-lite features`: what there is to choose from, one line each, or one feature in detail.

Read from features.json beside this file, which `python docs/generate.py` writes from the declarations: reading them
themselves takes importing torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import terminal

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature
    from mindspeed_lite.engine.fingerprints import Table

PROGRAM = "mindspeed-lite features"
INDEX = Path(__file__).with_name("features.json")
SCHEMA_VERSION = 2

NUMERICS = {
    "bitwise": "the same bits as without it",
    "ulp": "the same mathematics in another order of rounding",
    "deviation": "a documented deviation",
}


def main(arguments: Sequence[str]) -> int:
    """Print every feature, or one in detail; 2 for a name that does not exist."""
    parser = terminal.Parser(prog=PROGRAM, description="Every feature, one line each, or one in detail.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one feature, or its flag, with all details")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--diff", action="store_true", help="show how its targets differ from the verified releases")
    parser.add_argument("--against", metavar="DIR", help="with --diff: the folder that holds the other `megatron`")
    # A feature may be named by its flag, which a parser would take for one of its own.
    options, flags = parser.parse_known_args(list(arguments))
    names = [*([options.name] if options.name else []), *flags]
    if len(names) > 1:
        parser.error(f"one feature at a time, not {' '.join(names)}")
    try:
        features = read_index()
    except Exception as error:  # what keeps a feature's module from loading is what the user has to be told
        return terminal.fail(PROGRAM, f"{error}; `mindspeed-lite doctor` says what is missing", 1)
    found = None
    if names:
        found = _find(names[0], features)
        if found is None:
            return terminal.fail(PROGRAM, _unknown(names[0], features))
    if options.diff or options.against:
        return _diff(found, options.against)
    document = {"schema_version": SCHEMA_VERSION, "features": features if found is None else [found]}
    lines = _overview(features) if found is None else _details(found)
    print(json.dumps(document, indent=2) if options.json else "\n".join(lines))
    return 0


def _diff(feature: dict[str, Any] | None, against: str | None) -> int:
    if feature is None:
        return terminal.fail(PROGRAM, "--diff wants the name of a feature")
    from mindspeed_lite import runtime

    from . import features_diff

    return features_diff.show(PROGRAM, runtime.catalogue()[feature["name"]], runtime.fingerprints(), against)


def read_index() -> list[dict[str, Any]]:
    """Every feature as `describe` gives it; from the declarations where there are others than when it was written."""
    features: list[dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8")) if INDEX.is_file() else []
    package = importlib.util.find_spec("mindspeed_lite.patches")
    folders = [] if package is None else package.submodule_search_locations or []
    present = {each.name for each in pkgutil.iter_modules(folders) if not each.name.startswith("_")}
    return features if {each["name"] for each in features} == present else describe_all()


def describe_all() -> list[dict[str, Any]]:
    """Every feature, from its declaration."""
    from mindspeed_lite import runtime

    fingerprints = runtime.fingerprints()
    found: list[dict[str, Any]] = json.loads(
        json.dumps([describe(each, fingerprints) for each in runtime.catalogue()], default=str)
    )
    return found


def describe(feature: Feature, fingerprints: Table) -> dict[str, Any]:
    """Everything the declaration says, as plain values."""
    from mindspeed_lite.ops import dispatch

    module = sys.modules.get(f"mindspeed_lite.patches.{feature.name}")
    return {
        "name": feature.name,
        "summary": feature.summary,
        "theme": feature.theme,
        "numerics": feature.numerics,
        "flags": [
            {
                "flag": option.flag,
                "help": option.help,
                "default": option.default,
                "choices": None if option.choices is None else list(option.choices),
                "upstream": option.upstream,
            }
            for option in feature.options
        ],
        "patches": [
            {
                "kind": patch.kind,
                "target": patch.target,
                "versions": patch.versions,
                "absent_in": patch.absent_in,
                "reads": list(patch.reads),
                "relies_on": list(patch.relies_on),
            }
            for patch in feature.patches
        ],
        "verified": verified_releases(feature, fingerprints),
        "versions": list(dict.fromkeys(patch.versions for patch in feature.patches)),
        "backends": {name: [dispatch.REFERENCE, *dispatch.operator(name).backends] for name in feature.operators},
        "requires": [{"feature": each.feature, "reason": each.reason} for each in feature.requires],
        "conflicts": [{"feature": each.feature, "reason": each.reason} for each in feature.conflicts],
        "conflicting_args": dict(feature.conflicting_args),
        "not_auto": feature.not_auto,
        "unsupported": dict(feature.unsupported),
        "doc": inspect.cleandoc(getattr(module, "__doc__", None) or ""),
        "page": f"docs/features/{feature.name}.md",
    }


def verified_releases(feature: Feature, fingerprints: Table) -> list[str]:
    """The releases in whose source every target that counts there has a known fingerprint."""
    from packaging.version import Version

    from mindspeed_lite.engine import Provide

    releases = []
    for release in sorted(fingerprints.entries, key=Version):
        counting, _ = feature.patches_for(release)
        # What is provided is not there, so it has no source to know.
        known = [isinstance(patch, Provide) or patch.target in fingerprints.entries[release] for patch in counting]
        if counting and all(known):
            releases.append(release)
    return releases


def _find(name: str, features: list[dict[str, Any]]) -> dict[str, Any] | None:
    wanted = name.lstrip("-").replace("_", "-")
    for each in features:
        names = [each["name"], *(flag["flag"].lstrip("-") for flag in each["flags"])]
        if wanted in [known.replace("_", "-") for known in names]:
            return each
    return None


def _unknown(name: str, features: list[dict[str, Any]]) -> str:
    names = [each["name"] for each in features]
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), names, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"`{PROGRAM}` lists them"
    return f"there is no feature {name!r}; {hint}"


def _versions(feature: dict[str, Any]) -> str:
    ranges = [each or "any" for each in feature["versions"]]
    patched = "" if ranges in ([], ["any"]) else f" (patches for {' | '.join(ranges)})"
    return (", ".join(feature["verified"]) or "none yet") + patched


def _targets(feature: dict[str, Any]) -> list[str]:
    return [
        f"{patch['kind']} {patch['target']}" + (f" ({patch['versions']})" if patch["versions"] else "")
        for patch in feature["patches"]
    ]


def _overview(features: list[dict[str, Any]]) -> list[str]:
    """A line each, theme by theme; a summary that is too long is cut after a word."""
    columns, color = terminal.width(), terminal.has_color()
    left = max(len(each["name"]) for each in features) + 2
    lines = []
    for theme in dict.fromkeys(each["theme"] for each in features):
        lines.append(terminal.paint(theme, "bold", color))
        for each in features:
            if each["theme"] == theme:
                summary = terminal.cut(each["summary"], columns - left - 13)
                lines.append(f"  {each['name']:{left}}{each['numerics']:11}{summary}")
        lines.append("")
    return lines + terminal.wrap(
        f"{len(features)} features. `{PROGRAM} NAME` explains one; its flag is its name with dashes unless it says "
        "otherwise. Numerics: " + "; ".join(f"{name}: {meaning}" for name, meaning in NUMERICS.items()) + ".",
        columns,
    )


def _written(argument: str) -> str:
    """An argument of Megatron as its flag is written."""
    return "--" + argument.replace("_", "-")


def _details(feature: dict[str, Any]) -> list[str]:
    columns, color = terminal.width(), terminal.has_color()
    rows: list[tuple[str, str]] = []
    for flag in feature["flags"]:
        upstream = f" Megatron's own flag in {flag['upstream']}." if flag["upstream"] else ""
        choices = f" One of {', '.join(map(str, flag['choices']))}." if flag["choices"] else ""
        default = "" if flag["default"] in (False, None) else f" Default: {flag['default']}."
        rows.append(("flag", f"{flag['flag']}: {flag['help']}{choices}{default}{upstream}"))
    rows += [("swaps", text) for text in _targets(feature)]
    rows.append(("verified", _versions(feature)))
    rows.append(("numerics", f"{feature['numerics']}: {NUMERICS[feature['numerics']]}"))
    rows += [("backends", f"{operator}: {', '.join(names)}") for operator, names in feature["backends"].items()]
    rows += [("requires", f"{each['feature']}: {each['reason']}") for each in feature["requires"]]
    rows += [("conflicts", f"{each['feature']}: {each['reason']}") for each in feature["conflicts"]]
    rows += [
        ("not with", why if why.startswith(_written(name)) else f"{_written(name)}: {why}")
        for name, why in feature["conflicting_args"].items()
    ]
    rows += [("lacking", f"in {releases}: {why}") for releases, why in feature["unsupported"].items()]
    rows.append(("auto", f"leaves it off: {feature['not_auto']}" if feature["not_auto"] else ""))
    rows.append(("page", feature["page"]))
    lines = [terminal.paint(feature["name"], "bold", color)]
    lines += terminal.wrap(feature["summary"], columns)
    lines.append("")
    lines += terminal.labelled(rows, columns, color)
    for paragraph in filter(None, feature["doc"].split("\n\n")):
        lines.append("")
        # What is indented is code or a list: its line breaks mean something.
        indented = any(line.startswith(" ") for line in paragraph.split("\n"))
        lines += paragraph.split("\n") if indented else terminal.wrap(" ".join(paragraph.split()), columns)
    return lines
