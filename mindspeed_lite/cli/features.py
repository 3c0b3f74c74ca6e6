"""`mindspeed-lite features`: lists features, shows one, or compares its targets with a source."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import terminal
from .terminal import CommandError, say, table

if TYPE_CHECKING:
    from mindspeed_lite.engine import Catalogue, Feature
    from mindspeed_lite.engine.fingerprints import Table

PROGRAM = "mindspeed-lite features"
SCHEMA_VERSION = 2

NUMERICS = {
    "bitwise": "the same bits as without it",
    "ulp": "the same mathematics in another order of rounding",
    "deviation": "a documented deviation",
}


def main(arguments: Sequence[str]) -> int:
    parser = terminal.Parser(prog=PROGRAM, description="Every feature, one line each, or one in detail.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one feature, or its flag, with all details")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--diff", action="store_true", help="show how its targets differ from the verified releases")
    parser.add_argument("--against", metavar="DIR", help="with --diff: the folder that holds the other `megatron`")
    # The parser would take a feature's flag for its own.
    options, flags = parser.parse_known_args(list(arguments))
    names = [*([options.name] if options.name else []), *flags]
    if len(names) > 1:
        parser.error(f"one feature at a time, not {' '.join(names)}")
    try:
        from mindspeed_lite import runtime

        from .npu_probe import without_autoload

        with without_autoload():  # declarations need no device
            catalogue, known = runtime.catalogue(), runtime.fingerprints()
    except Exception as error:  # report why a feature's module does not load
        raise CommandError(f"{error}; `mindspeed-lite doctor` says what is missing", 1) from error
    feature = _find(names[0], catalogue) if names else None
    if options.diff or options.against:
        if feature is None:
            raise CommandError("--diff wants the name of a feature")
        return _show_differences(feature, options.against)
    described = [describe(each, known) for each in catalogue if feature in (None, each)]
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "features": described}, indent=2, default=str))
    elif feature is not None:
        _show(described[0])
    else:
        for theme in dict.fromkeys(each["theme"] for each in described):
            rows = [(each["name"], each["numerics"], each["summary"]) for each in described if each["theme"] == theme]
            table(("", "", ""), rows, theme)
        say(
            f"\n{len(described)} features. `{PROGRAM} NAME` explains one; its flag is its name with dashes unless it "
            f"says otherwise. Numerics: {'; '.join(f'{name}: {meaning}' for name, meaning in NUMERICS.items())}."
        )
    return 0


def describe(feature: Feature, known: Table) -> dict[str, Any]:
    from mindspeed_lite.ops import dispatch

    def values(each: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(each, name) for name in names}

    module = sys.modules.get(f"mindspeed_lite.patches.{feature.name}")
    return {
        **values(feature, "name", "summary", "theme", "numerics"),
        "flags": [values(each, "flag", "help", "default", "choices", "upstream") for each in feature.options],
        "patches": [
            values(each, "kind", "target", "versions", "absent_in", "reads", "relies_on") for each in feature.patches
        ],
        "verified": verified_releases(feature, known),
        "versions": list(dict.fromkeys(patch.versions for patch in feature.patches)),
        "backends": {name: [dispatch.REFERENCE, *dispatch.operator(name).backends] for name in feature.operators},
        "requires": [values(each, "feature", "reason") for each in feature.requires],
        "conflicts": [values(each, "feature", "reason") for each in feature.conflicts],
        "conflicting_args": dict(feature.conflicting_args),
        "not_auto": feature.not_auto,
        "unsupported": dict(feature.unsupported),
        "doc": inspect.cleandoc(getattr(module, "__doc__", None) or ""),
        "page": f"docs/features/{feature.name}.md",
    }


def verified_releases(feature: Feature, known: Table) -> list[str]:
    from packaging.version import Version

    from mindspeed_lite.engine import Provide

    releases = []
    for release in sorted(known.entries, key=Version):
        counting, _ = feature.patches_for(release)
        # Provided targets have no source.
        if counting and all(isinstance(each, Provide) or each.target in known.entries[release] for each in counting):
            releases.append(release)
    return releases


def _find(name: str, catalogue: Catalogue) -> Feature:
    wanted = name.lstrip("-").replace("-", "_")
    for each in catalogue:
        if wanted in (each.name, *(option.flag.lstrip("-").replace("-", "_") for option in each.options)):
            return each
    close = difflib.get_close_matches(wanted, [each.name for each in catalogue], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"`{PROGRAM}` lists them"
    raise CommandError(f"there is no feature {name!r}; {hint}")


def _show(feature: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = []
    for flag in feature["flags"]:
        upstream = f" Megatron's own flag in {flag['upstream']}." if flag["upstream"] else ""
        choices = f" One of {', '.join(map(str, flag['choices']))}." if flag["choices"] else ""
        default = "" if flag["default"] in (False, None) else f" Default: {flag['default']}."
        rows.append(("flag", f"{flag['flag']}: {flag['help']}{choices}{default}{upstream}"))
    for each in feature["patches"]:
        versions = f" ({each['versions']})" if each["versions"] else ""
        rows.append(("swaps", f"{each['kind']} {each['target']}{versions}"))
    ranges = [each or "any" for each in feature["versions"]]
    patched = "" if ranges in ([], ["any"]) else f" (patches for {' | '.join(ranges)})"
    rows.append(("verified", (", ".join(feature["verified"]) or "none yet") + patched))
    rows.append(("numerics", f"{feature['numerics']}: {NUMERICS[feature['numerics']]}"))
    rows += [("backends", f"{operator}: {', '.join(names)}") for operator, names in feature["backends"].items()]
    rows += [(kind, f"{each['feature']}: {each['reason']}") for kind in ("requires", "conflicts")
             for each in feature[kind]]  # fmt: skip
    for name, why in feature["conflicting_args"].items():
        flag = "--" + name.replace("_", "-")
        rows.append(("not with", why if why.startswith(flag) else f"{flag}: {why}"))
    rows += [("lacking", f"in {releases}: {why}") for releases, why in feature["unsupported"].items()]
    if feature["not_auto"]:
        rows.append(("auto", f"leaves it off: {feature['not_auto']}"))
    say(feature["name"], "bold")
    say(f"{feature['summary']}\n")
    table(("", ""), [*rows, ("page", feature["page"])])
    for paragraph in filter(None, feature["doc"].split("\n\n")):
        # Indented text is code or a list: keep line breaks.
        indented = any(line.startswith(" ") for line in paragraph.split("\n"))
        say(f"\n{paragraph if indented else ' '.join(paragraph.split())}")


def compared(feature: Feature, version: str, root: Path) -> dict[str, tuple[str, str]]:
    from mindspeed_lite import runtime
    from mindspeed_lite.engine.fingerprints import fingerprinted
    from mindspeed_lite.engine.source import reader_of

    reader = reader_of(root)
    return {
        target: runtime.fingerprints().compare(patch, target, reader)
        for patch in feature.patches_for(version)[0]
        for target in fingerprinted(patch)
    }


def _show_differences(feature: Feature, against: str | None) -> int:
    from mindspeed_lite.engine import FingerprintError
    from mindspeed_lite.engine.source import reader_of, source_text
    from mindspeed_lite.platform import megatron

    version, root = megatron.version(), megatron.root()
    if version is None or root is None:
        raise CommandError("megatron.core cannot be found: install megatron-core or set PYTHONPATH")
    if against is not None and not (Path(against) / "megatron" / "core").is_dir():
        raise CommandError(f"--against {against}: there is no megatron/core in it")
    has_differences = False
    for target, (state, objection) in compared(feature, version, root).items():
        print(f"{target}: {state}")
        has_differences |= bool(objection)
        if against is not None:
            try:
                there, here = (source_text(reader_of(each), target).splitlines() for each in (Path(against), root))
            except (OSError, FingerprintError, SyntaxError) as error:
                print(f"  no source to compare: {error}")
                continue
            lines = list(difflib.unified_diff(there, here, against, f"here ({version})", lineterm=""))
            has_differences |= bool(lines)
            print("\n".join(lines or ["  the same text"]))
    return int(has_differences)
