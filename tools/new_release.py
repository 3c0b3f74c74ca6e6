"""What a release of Megatron changes for this package, in one command.

    python -m tools.new_release 0.20.0            a version: its wheel is fetched
    python -m tools.new_release PATH              a wheel, or a folder that holds `megatron/`: a checkout
    ... --record                                  write its fingerprints, once every difference has been read
    ... --test                                    run the tests of the features that are hit, on that release

Prints each target that is not as in the newest recorded release before it, with the difference of its source and the
features that stand on it; then the features that would be refused there. Nothing of Megatron is imported.
"""

from __future__ import annotations

import argparse
import difflib
import os
import runpy
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature, FingerprintError, Override, Patch
from mindspeed_lite.engine.fingerprints import Table, fingerprinted
from mindspeed_lite.engine.source import fingerprint, reader_of, source_text
from mindspeed_lite.platform import megatron
from tests.harness import checkouts

ROOT = checkouts.ROOT
TABLES = {
    "mindspeed_lite.patches": ROOT / "patches" / "fingerprints.json",
    "mindspeed_lite.platform.megatron:ASSUMPTIONS": ROOT / "mindspeed_lite" / "platform" / "fingerprints.json",
}


@dataclass
class Change:
    """One target that is not as it was: how, the lines of the difference, and the patches that stand on it."""

    target: str
    how: str
    lines: list[str] = field(default_factory=list)
    patches: list[tuple[Feature, Patch]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.new_release", description="What a release of Megatron changes for this package."
    )
    parser.add_argument("release", metavar="PATH_OR_VERSION", help="a version, a wheel, or a folder with `megatron/`")
    parser.add_argument("--name", help="the version to record it as, for a checkout between releases: 0.20.0.dev0")
    parser.add_argument("--against", metavar="VERSION", help="the recorded release to compare with; the one before it")
    parser.add_argument("--record", action="store_true", help="write its fingerprints into the tables")
    parser.add_argument("--test", action="store_true", help="run the tests of the features that are hit")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        root = _root_of(options.release)
        version = str(Version(options.name or _version_of(root)))
        against = options.against or _newest_before(version)
        other = checkouts.folder(against) or megatron.root()
        if other is None or not (other / "megatron").is_dir():
            raise ValueError(f"megatron-core {against} is not here: run `python -m tests.harness.checkouts`")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"megatron-core {version} in {root}, against {against}")
    found = list(changes(root, version, other, against))
    for each in found:
        _print(each)
    hit = {feature.name: feature for each in found for feature, _ in each.patches}
    refused = [name for name in hit if any(_refuses(each, name, version) for each in found)]
    targets = len({target for *_, target in _targets(version)})
    print(
        f"\n{len(found)} of {targets} targets differ; they hit {len(hit)} features: {', '.join(sorted(hit)) or 'none'}"
    )
    print(f"not applied as it stands: {', '.join(sorted(refused)) or 'none'}")
    failed = False
    if options.record:
        for source, table in TABLES.items():
            kind = "--features" if ":" in source else "--package"
            failed |= bool(
                _run("-m", "tools.fingerprints", kind, source, "--root", f"{version}={root}", "--out", str(table))
            )
    failed |= options.test and not _test(root, [each.name for each in runtime.catalogue() if each.name in hit])
    print(f"{time.monotonic() - started:.0f} s")
    return int(failed or (bool(refused) and not options.record))


def changes(root: Path, version: str, other: Path, against: str) -> Iterator[Change]:
    """Each target of a patch for `version` whose source in `root` is not that of `against` in `other`."""
    here, there = reader_of(root), reader_of(other)
    standing: dict[str, list[tuple[Feature, Patch]]] = {}
    for feature, patch, target in _targets(version):
        standing.setdefault(target, []).append((feature, patch))
    for target, patches in sorted(standing.items()):
        try:
            new, text = fingerprint(here, target), source_text(here, target)
        except (FingerprintError, SyntaxError) as error:
            if not all(runtime.fingerprints().may_lack(patch, target) for _, patch in patches):
                yield Change(target, str(error), patches=patches)
            continue
        try:
            old, before = fingerprint(there, target), source_text(there, target)
        except (FingerprintError, SyntaxError):
            yield Change(target, f"is not in {against}", patches=patches)
            continue
        if new == old:
            continue
        names = f"megatron-core {against}", f"megatron-core {version}"
        lines = list(difflib.unified_diff(before.splitlines(), text.splitlines(), *names, lineterm=""))
        how = f"has the signature {new.signature}, before {old.signature}" if new.signature != old.signature else ""
        how = how or ("has another body" if lines else "has the same text; what it calls differs")
        yield Change(target, how, lines, patches)


def _targets(version: str) -> Iterator[tuple[Feature, Patch, str]]:
    for feature in (*runtime.catalogue(), *megatron.ASSUMPTIONS):
        for patch in feature.patches_for(version)[0]:
            yield from ((feature, patch, target) for target in fingerprinted(patch))


def _refuses(change: Change, name: str, version: str) -> bool:
    """Whether a plan would refuse the feature for this change, unless the release is recorded."""
    around = change.how.startswith(("has another body", "has the same text"))
    return any(
        feature.name == name and (isinstance(patch, Override) or change.target in patch.relies_on or not around)
        for feature, patch in change.patches
    )


def _print(change: Change) -> None:
    users = dict.fromkeys(
        f"{feature.name} ({'relies on it' if change.target in patch.relies_on else patch.kind})"
        for feature, patch in change.patches
    )
    print(f"\n{change.target}: {change.how}\n  {', '.join(users)}")
    print("\n".join(f"  {line}" for line in change.lines))


def _root_of(release: str) -> Path:
    """The folder that holds the release's `megatron`, fetched or unpacked into `.releases/` where it must be."""
    path = Path(release)
    if path.is_dir():
        if not (path / "megatron" / "core" / "package_info.py").is_file():
            raise ValueError(f"{release}: there is no megatron/core in it")
        return path.resolve()
    if path.suffix == ".whl":
        _, version, *_ = parse_wheel_filename(path.name)
        target = checkouts.FOLDER / str(version)
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(target)
        return target
    return checkouts.fetched(str(Version(release))) or megatron.root() or Path()


def _version_of(root: Path) -> str:
    found = runpy.run_path(str(root / "megatron" / "core" / "package_info.py"))["__version__"]
    return str(found).partition("+")[0]


def _newest_before(version: str) -> str:
    recorded = [
        each for each in Table.load(TABLES["mindspeed_lite.patches"]).entries if Version(each) < Version(version)
    ]
    if not recorded:
        raise ValueError(f"no release before {version} is recorded: name one with --against")
    return max(recorded, key=Version)


def _test(root: Path, features: Sequence[str]) -> bool:
    """Run the tests of these features with this release first on the path; True if none fails."""
    files = [f"tests/patches/test_{name}.py" for name in features]
    return not files or _run("-m", "pytest", "-q", *files, path=root) == 0


def _run(*words: str, path: Path | None = None) -> int:
    places = [*([str(path)] if path is not None else []), str(ROOT)]
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
