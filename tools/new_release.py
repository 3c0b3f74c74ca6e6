"""What a release of Megatron changes for this package, in one command.

    python -m tools.new_release 0.20.0            a version: its wheel is fetched
    python -m tools.new_release FOLDER            a checkout: a folder that holds `megatron/`
    ... --record                                  write its fingerprints, once every difference has been read
    ... --test                                    run the tests of the features that are hit, on that release

Prints each target that differs from the newest recorded release before it, with the difference of its source and the
features that depend on it; then the features that would be refused there. Nothing of Megatron is imported.
"""

from __future__ import annotations

import argparse
import difflib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature, FingerprintError, Override, Patch
from mindspeed_lite.engine.fingerprints import Table, fingerprinted
from mindspeed_lite.engine.source import fingerprint, reader_of, source_text
from mindspeed_lite.platform import megatron
from tests.harness import checkouts
from tests.harness.checkouts import ROOT
from tools import fingerprints


@dataclass
class Change:
    """One target that differs: how, the lines of the difference, and the patches that depend on it."""

    target: str
    how: str
    lines: list[str] = field(default_factory=list)
    patches: list[tuple[Feature, Patch]] = field(default_factory=list)

    def refused(self) -> set[str]:
        """The features that a plan would refuse for this change, unless the release is recorded."""
        is_body = self.how.startswith(("has another body", "has the same text"))
        return {
            feature.name
            for feature, patch in self.patches
            if isinstance(patch, Override) or self.target in patch.relies_on or not is_body
        }

    def __str__(self) -> str:
        users = dict.fromkeys(
            f"{feature.name} ({'relies on it' if self.target in patch.relies_on else patch.kind})"
            for feature, patch in self.patches
        )
        return "\n".join(
            [f"\n{self.target}: {self.how}", f"  {', '.join(users)}", *(f"  {each}" for each in self.lines)]
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.new_release", description="What a release of Megatron changes for this package."
    )
    parser.add_argument("release", metavar="FOLDER_OR_VERSION", help="a version, or a folder with `megatron/`")
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
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"megatron-core {version} in {root}, against {against}")
    found = list(changes(root, version, other, against))
    print("\n".join(map(str, found)))
    hit = sorted({feature.name for each in found for feature, _ in each.patches})
    refused = sorted({name for each in found for name in each.refused()})
    targets = len({target for *_, target in _targets(version)})
    print(f"\n{len(found)} of {targets} targets differ; they hit {len(hit)} features: {', '.join(hit) or 'none'}")
    print(f"not applied as it stands: {', '.join(refused) or 'none'}")
    failed = False
    if options.record:
        failed = fingerprints.main(["--root", f"{version}={root}"]) > 0
    if options.test:
        failed |= not _test(root, [name for name in hit if name in runtime.catalogue()])
    print(f"{time.monotonic() - started:.0f} s")
    return int(failed or (bool(refused) and not options.record))


def changes(root: Path, version: str, other: Path, against: str) -> Iterator[Change]:
    """Each target of a patch for `version` whose source in `root` is not that of `against` in `other`."""
    here, there = reader_of(root), reader_of(other)
    depending: dict[str, list[tuple[Feature, Patch]]] = {}
    for feature, patch, target in _targets(version):
        depending.setdefault(target, []).append((feature, patch))
    for target, patches in sorted(depending.items()):
        if not (checkouts.holds(root, target) and checkouts.holds(other, target)):
            continue  # a wheel holds less than its release's repository
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
        if new != old:
            names = f"megatron-core {against}", f"megatron-core {version}"
            lines = list(difflib.unified_diff(before.splitlines(), text.splitlines(), *names, lineterm=""))
            how = "has another body" if lines else "has the same text; what it calls differs"
            if new.signature != old.signature:
                how = f"has the signature {new.signature}, before {old.signature}"
            yield Change(target, how, lines, patches)


def _targets(version: str) -> Iterator[tuple[Feature, Patch, str]]:
    for feature in (*runtime.catalogue(), *megatron.ASSUMPTIONS):
        for patch in feature.patches_for(version)[0]:
            yield from ((feature, patch, target) for target in fingerprinted(patch))


def _root_of(release: str) -> Path:
    """The folder that holds the release's `megatron`; a version is fetched into `.releases/`."""
    path = Path(release)
    if not path.is_dir():
        return checkouts.fetched(str(Version(release))) or megatron.root() or Path()
    if not (path / "megatron" / "core" / "package_info.py").is_file():
        raise ValueError(f"{release}: there is no megatron/core in it")
    return path.resolve()


def _version_of(root: Path) -> str:
    found = runpy.run_path(str(root / "megatron" / "core" / "package_info.py"))["__version__"]
    return str(found).partition("+")[0]


def _newest_before(version: str) -> str:
    recorded = [each for each in Table.load(fingerprints.PATCHES).entries if Version(each) < Version(version)]
    if not recorded:
        raise ValueError(f"no release before {version} is recorded: name one with --against")
    return max(recorded, key=Version)


def _test(root: Path, features: Sequence[str]) -> bool:
    """Run the tests of these features with this release first on the path; True if none fails."""
    files = [f"tests/patches/test_{name}.py" for name in features]
    path = os.pathsep.join([str(root), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", *files]
    return not files or subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
