"""Writes or checks a table of fingerprints: what targets, and what patches rely on, look like in several releases.

python -m tools.fingerprints --package mindspeed_lite.patches --root 0.18.2=FOLDER --out patches/fingerprints.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from mindspeed_lite.engine import Catalogue, EngineError, Feature, FingerprintError
from mindspeed_lite.engine.fingerprints import Table, fingerprinted
from mindspeed_lite.engine.source import Fingerprint, fingerprint, reader_of
from tests.harness.checkouts import holds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fingerprints",
        description="Fingerprint every target of the catalogue in several releases of the host.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", help="package with one feature a module")
    source.add_argument("--features", metavar="MODULE:NAME", help="a sequence of features in a module")
    parser.add_argument(
        "--root",
        required=True,
        action="append",
        type=_release,
        metavar="VERSION=DIR",
        help="a release and the folder that contains its top-level package",
    )
    parser.add_argument("--out", required=True, type=Path, help="the table; releases without --root are kept")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    options = parser.parse_args(arguments)
    try:
        if options.package:
            features: Iterable[Feature] = Catalogue.load(options.package)
        else:
            module, _, name = options.features.partition(":")
            features = getattr(importlib.import_module(module), name)
    except (EngineError, ImportError, AttributeError) as error:
        return _fail([str(error)])
    features = tuple(features)
    table = Table.load(options.out) if options.out.exists() else Table()
    problems: list[str] = []
    for version, root in options.root:
        reader = reader_of(root)
        found: dict[str, Fingerprint] = {}
        for feature in features:
            patches = feature.patches_for(version)[0]
            for patch, target in ((each, target) for each in patches for target in fingerprinted(each)):
                try:
                    found[target] = found.get(target) or fingerprint(reader, target)
                except FingerprintError as error:
                    recorded = table.entries.get(version, {}).get(target)
                    if not holds(Path(root), target):  # a wheel holds less than its release's repository
                        found.update({} if recorded is None else {target: recorded})
                    elif target not in patch.relies_on:  # what it relies on, a release may lack
                        problems.append(f"feature `{feature.name}` at {version}: {error}")
        if options.check:
            known = table.entries.get(version, {})
            changed = sorted(t for t in found.keys() | known.keys() if found.get(t) != known.get(t))
            problems += [f"`{target}` at {version}: the table is out of date." for target in changed]
        table.entries[version] = found
    if problems:
        return _fail(problems)
    if not options.check:
        _save(table, options.out)
    print(f"{len(table.entries)} releases, {sum(map(len, table.entries.values()))} fingerprints")
    return 0


def _save(table: Table, path: Path) -> None:
    rows = {
        version: {target: asdict(found) for target, found in sorted(table.entries[version].items())}
        for version in sorted(table.entries, key=Version)
    }
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _release(text: str) -> tuple[str, str]:
    version, _, root = text.partition("=")
    if not Path(root or "?").is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is not a release and a folder, such as 1.2.0=/path/to/checkout")
    return str(Version(version)), root


def _fail(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
