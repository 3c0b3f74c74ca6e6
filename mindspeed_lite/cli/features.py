"""`mindspeed-lite features`: what there is to choose from, from the declarations; imports no Megatron."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import features_diff, terminal

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature
    from mindspeed_lite.engine.fingerprints import Table

PROGRAM = "mindspeed-lite features"

NUMERICS = {
    "bitwise": "the same bits as without it",
    "ulp": "the same mathematics in another order of rounding",
    "deviation": "a documented deviation",
}


def main(arguments: Sequence[str]) -> int:
    """Print every feature, or one in detail; 2 for a name that does not exist."""
    parser = terminal.Parser(prog=PROGRAM, description="Every feature, or one in detail.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one feature (or its flag), with all details")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--diff", action="store_true", help="show how its targets differ from the verified releases")
    parser.add_argument("--against", metavar="DIR", help="with --diff: the folder that holds the other `megatron`")
    options = parser.parse_args(list(arguments))
    try:
        from mindspeed_lite import runtime

        catalogue = runtime.catalogue()
        fingerprints = runtime.fingerprints()
    except Exception as error:  # what keeps a feature's module from loading is what the user has to be told
        return terminal.fail(PROGRAM, f"{error}; `mindspeed-lite doctor` says what is missing", 1)
    if options.diff or options.against:
        if options.name is None:
            return terminal.fail(PROGRAM, "--diff wants the name of a feature")
        found = _find(options.name, catalogue)
        if found is None:
            return terminal.fail(PROGRAM, _unknown(options.name, catalogue))
        return features_diff.show(PROGRAM, found, fingerprints, options.against)
    if options.name is None:
        described = [describe(feature, fingerprints) for feature in catalogue]
        lines = _overview(described)
        document: dict[str, Any] = {"schema_version": 1, "features": described}
    else:
        found = _find(options.name, catalogue)
        if found is None:
            return terminal.fail(PROGRAM, _unknown(options.name, catalogue))
        one = describe(found, fingerprints)
        lines = _details(one)
        document = {"schema_version": 1, "features": [one]}
    print(json.dumps(document, indent=2, default=str) if options.json else "\n".join(lines))
    return 0


def describe(feature: Feature, fingerprints: Table) -> dict[str, Any]:
    """Everything the declaration says, as plain values, and what holds here."""
    from mindspeed_lite.ops import dispatch

    module = sys.modules.get(f"mindspeed_lite.patches.{feature.name}")
    return {
        "name": feature.name,
        "summary": feature.summary,
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
            {"kind": patch.kind, "target": patch.target, "versions": patch.versions, "reads": list(patch.reads)}
            for patch in feature.patches
        ],
        "verified": verified_releases(feature, fingerprints),
        "versions": list(dict.fromkeys(patch.versions for patch in feature.patches)),
        "backends": {name: dispatch.backends(name) for name in feature.operators},
        "requires": [{"feature": each.feature, "reason": each.reason} for each in feature.requires],
        "conflicts": [{"feature": each.feature, "reason": each.reason} for each in feature.conflicts],
        "doc": inspect.cleandoc(getattr(module, "__doc__", None) or ""),
        "page": f"docs/features/{feature.name}.md",
    }


def verified_releases(feature: Feature, fingerprints: Table) -> list[str]:
    """The releases in whose source every target that counts there has a known fingerprint."""
    from packaging.version import Version

    from mindspeed_lite.engine import Provide, matches

    releases = []
    for release in sorted(fingerprints.entries, key=Version):
        counting = [patch for patch in feature.patches if matches(patch.versions, release)]
        # What is provided is not there, so it has no source to know.
        known = [isinstance(patch, Provide) or patch.target in fingerprints.entries[release] for patch in counting]
        if counting and all(known):
            releases.append(release)
    return releases


def _find(name: str, catalogue: Any) -> Feature | None:
    dest = name.lstrip("-").replace("-", "_")
    for feature in catalogue:
        if dest == feature.name or dest in {option.dest for option in feature.options}:
            found: Feature = feature
            return found
    return None


def _unknown(name: str, catalogue: Any) -> str:
    names = [feature.name for feature in catalogue]
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


def _usable(feature: dict[str, Any]) -> str:
    texts = []
    for operator, backends in feature["backends"].items():
        here = ", ".join(name for name, reasons in backends.items() if not reasons)
        absent = ", ".join(name for name, reasons in backends.items() if reasons)
        texts.append(f"{operator}: {here}" + (f"; not {absent}" if absent else ""))
    return "\n".join(texts)


def _overview(features: list[dict[str, Any]]) -> list[str]:
    """A table where it fits, else a paragraph each; then why backends are unusable."""
    columns, color = terminal.width(), terminal.has_color()
    rows = [
        (
            each["name"],
            "\n".join(flag["flag"] for flag in each["flags"]),
            "\n".join(_targets(each)),
            _versions(each),
            _usable(each),
            each["numerics"],
            each["summary"],
        )
        for each in features
    ]
    headers = ("feature", "flags", "swaps", "verified for Megatron", "backends here", "numerics", "summary")
    lines = terminal.table(headers, rows, columns, color, minimum=(0, 0, 40, 14, 22, 0, 24))
    if lines is None:
        lines = []
        for name, flags, swaps, verified, backends, numerics, summary in rows:
            texts = (("summary", summary), ("flags", flags), ("swaps", swaps), ("verified", verified))
            lines.append(terminal.paint(name, "bold", color))
            lines += terminal.labelled([*texts, ("backends", backends), ("numerics", numerics)], columns, color)
            lines.append("")
    else:
        lines.append("")
    reasons: dict[str, list[str]] = {}
    for each in features:
        for operator, backends_of in each["backends"].items():
            for backend, why in backends_of.items():
                if why:
                    reasons.setdefault(f"{backend}: {'; '.join(why)}", []).append(operator)
    if reasons:
        operators = {name for each in features for name in each["backends"]}
        lines.append(terminal.paint("backends not usable here", "bold", color))
        for text, users in reasons.items():
            of = "" if set(users) == operators else f" ({', '.join(dict.fromkeys(users))})"
            lines += terminal.labelled([("-", text + of)], columns, color)
        lines.append("")
    lines += terminal.wrap(
        f"{len(features)} features. `{PROGRAM} NAME` explains one; numerics: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in NUMERICS.items())
        + ".",
        columns,
    )
    return lines


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
    for operator, backends in feature["backends"].items():
        rows += [
            ("backend", f"{operator} on {name}: {'; '.join(reasons) or 'usable here'}")
            for name, reasons in backends.items()
        ]
    rows += [("requires", f"{each['feature']}: {each['reason']}") for each in feature["requires"]]
    rows += [("conflicts", f"{each['feature']}: {each['reason']}") for each in feature["conflicts"]]
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
