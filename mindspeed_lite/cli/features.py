"""Every feature, one line each, or one in detail."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import terminal
from .terminal import CommandError, Parser, say, table

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature
    from mindspeed_lite.engine.fingerprints import Table

PROGRAM = "mindspeed-lite features"
SCHEMA_VERSION = 2

NUMERICS = {
    "bitwise": "the same bits as without it",
    "ulp": "the same mathematics in another order of rounding",
    "deviation": "a documented deviation",
}


def add_options(parser: Parser) -> None:
    parser.keeps_unknown = True  # a feature's flag may stand for its name
    parser.add_argument("name", nargs="?", metavar="NAME", help="one feature, or its flag, with all details")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--diff", action="store_true", help="show how its targets differ from the verified releases")
    parser.add_argument("--against", metavar="DIR", help="with --diff: the folder that holds the other `megatron`")


def main(options: argparse.Namespace) -> int:
    names = [*filter(None, [options.name]), *options.unknown]
    if len(names) > 1:
        raise CommandError(f"one feature at a time, not {' '.join(names)}")
    if not (names or options.json or options.diff or options.against):
        _show_list()
        return 0
    try:
        from mindspeed_lite import runtime

        from .npu_probe import without_autoload

        with terminal.progress("reading the declarations"), without_autoload():  # they need no device
            catalogue, known = runtime.catalogue(), runtime.fingerprints()
    except Exception as error:  # report why a feature's module does not load
        raise CommandError(f"{error}; `mindspeed-lite doctor` says what is missing", 1) from error
    feature = _find(names[0], list(catalogue)) if names else None
    if options.diff or options.against:
        if feature is None:
            raise CommandError("--diff wants the name of a feature")
        return _show_differences(feature, options.against)
    described = [describe(each, known) for each in catalogue if feature in (None, each)]
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "features": described}, indent=2, default=str))
    else:
        _show(described[0])
    return 0


def _show_list() -> None:
    """Read the declarations as text: importing them imports torch, which takes a second."""
    from mindspeed_lite import patches

    themes: dict[str, list[tuple[str, str, str]]] = {}
    for file in sorted(Path(patches.__path__[0]).glob("[!_]*.py")):
        for node in ast.parse(file.read_bytes()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FEATURE":
                assert isinstance(node.value, ast.Call)
                given = {str(each.arg): getattr(each.value, "value", "") for each in node.value.keywords}
                themes.setdefault(given["theme"], []).append((file.stem, given["numerics"], given["summary"]))
    for theme, rows in themes.items():
        table(("", "", ""), rows, theme)
    say(
        f"\n{sum(map(len, themes.values()))} features. `{PROGRAM} NAME` explains one; its flag is its name with dashes "
        f"unless it says otherwise. Numerics: {'; '.join(f'{name}: {meaning}' for name, meaning in NUMERICS.items())}."
    )


def describe(feature: Feature, known: Table) -> dict[str, Any]:
    from mindspeed_lite.ops import dispatch

    def values(each: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(each, name) for name in names}

    module = sys.modules.get(f"mindspeed_lite.patches.{feature.name}")
    return {
        **values(feature, "name", "summary", "theme", "numerics"),
        "flags": [values(each, "flag", "help", "default", "choices", "upstream") for each in feature.options],
        "patches": [values(each, "kind", "target", "versions", "reads", "relies_on") for each in feature.patches],
        "verified": verified_releases(feature, known),
        "versions": list(dict.fromkeys(patch.versions for patch in feature.patches)),
        "backends": {name: [dispatch.REFERENCE, *dispatch.operator(name).backends] for name in feature.operators},
        "requires": [values(each, "feature", "reason") for each in feature.requires],
        "conflicts": [values(each, "feature", "reason") for each in feature.conflicts],
        "conflicting_args": dict(feature.conflicting_args),
        "graphs": why_not_in_graphs(feature),
        "not_auto": feature.not_auto,
        "unsupported": dict(feature.unsupported),
        "doc": inspect.cleandoc(getattr(module, "__doc__", None) or ""),
        "page": f"docs/features/{feature.name}.md",
    }


def why_not_in_graphs(feature: Feature) -> str:
    """Why its forward or backward, or that of a feature it requires, cannot be captured; "" if they can."""
    from mindspeed_lite import runtime

    required = [runtime.catalogue()[each.feature] for each in feature.requires]
    for each in (feature, *required):
        if why := each.conflicting_args.get("cuda_graph_impl"):
            return why if each is feature else f"requires {each.name}: {why}"
    return ""


def verified_releases(feature: Feature, known: Table) -> list[str]:
    from packaging.version import Version

    from mindspeed_lite.engine import Provide

    def is_verified(release: str) -> bool:
        counting = feature.patches_for(release)[0]
        # Provided targets have no source.
        return bool(counting) and all(isinstance(p, Provide) or p.target in known.entries[release] for p in counting)

    return [release for release in sorted(known.entries, key=Version) if is_verified(release)]


def _find(name: str, catalogue: list[Feature]) -> Feature:
    plain = name.lstrip("-").replace("-", "_")
    for feature in catalogue:
        if plain in (feature.name, *(option.flag[2:].replace("-", "_") for option in feature.options)):
            return feature
    close = difflib.get_close_matches(plain, [each.name for each in catalogue], n=3, cutoff=0.4)
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
    if "cuda_graph_impl" not in feature["conflicting_args"]:
        stays = "stays on with --cuda-graph-impl: reads nothing from the device in a training on CPU"
        rows.append(("graphs", feature["graphs"] or stays))
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
    """Target -> its state in the Megatron at `root`, and the objection to patching it, or ""."""
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
