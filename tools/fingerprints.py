"""Writes or checks the tables of fingerprints: what targets, and what patches rely on, look like in each release.

python -m tools.fingerprints [--root VERSION=DIR ...] [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature, FingerprintError
from mindspeed_lite.engine.fingerprints import Table, fingerprinted
from mindspeed_lite.engine.source import Fingerprint, fingerprint, reader_of
from mindspeed_lite.platform import megatron
from tests.harness import checkouts

PATCHES = checkouts.ROOT / "patches" / "fingerprints.json"
TABLES: Mapping[Path, Iterable[Feature]] = {
    PATCHES: tuple(runtime.catalogue()),
    checkouts.ROOT / "mindspeed_lite" / "platform" / "fingerprints.json": megatron.ASSUMPTIONS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fingerprints", description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "--root",
        action="append",
        type=_release,
        metavar="VERSION=DIR",
        help="a release and the folder that has its `megatron`; others are kept (default: the tests' releases)",
    )
    parser.add_argument("--check", action="store_true", help="compare with the tables instead of writing them")
    options = parser.parse_args(arguments)
    roots = options.root or [(each, checkouts.folder(each) or megatron.root() or Path()) for each in checkouts.EVERY]
    tables = {file: Table.load(file) for file in TABLES}
    problems = [each for file, table in tables.items() for each in _renew(table, TABLES[file], roots, options.check)]
    if problems:
        print("\n".join(f"error: {each}" for each in problems), file=sys.stderr)
        return 1
    for file, table in tables.items():
        if not options.check:
            _save(table, file)
        print(
            f"{len(table.entries)} releases, {sum(map(len, table.entries.values()))} fingerprints in {file.parent.name}"
        )
    return 0


def _renew(
    table: Table, features: Iterable[Feature], roots: Iterable[tuple[str, Path]], is_check: bool
) -> Iterator[str]:
    """Enter what releases hold; problems are what they lack, and with `is_check` what the table has otherwise."""
    for version, root in roots:
        reader, known = reader_of(root), table.entries.get(version, {})
        found: dict[str, Fingerprint] = {}
        for feature in features:
            patches = feature.patches_for(version)[0]
            for patch, target in ((each, target) for each in patches for target in fingerprinted(each)):
                try:
                    found[target] = found.get(target) or fingerprint(reader, target)
                except FingerprintError as error:
                    if not checkouts.holds(root, target):  # a wheel holds less than its release's repository
                        found.update({target: known[target]} if target in known else {})
                    elif target not in patch.relies_on:  # what it relies on, a release may lack
                        yield f"feature `{feature.name}` at {version}: {error}"
        if is_check:
            changed = sorted(t for t in found.keys() | known.keys() if found.get(t) != known.get(t))
            yield from (f"`{target}` at {version}: the table is out of date." for target in changed)
        table.entries[version] = found


def _save(table: Table, path: Path) -> None:
    rows = {
        version: {target: asdict(found) for target, found in sorted(table.entries[version].items())}
        for version in sorted(table.entries, key=Version)
    }
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _release(text: str) -> tuple[str, Path]:
    version, _, root = text.partition("=")
    if not Path(root or "?").is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is not a release and a folder, such as 1.2.0=/path/to/checkout")
    return str(Version(version)), Path(root)


if __name__ == "__main__":
    sys.exit(main())
