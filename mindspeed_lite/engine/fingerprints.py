"""Known fingerprints by release, and their comparison with the installed host."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from .errors import FingerprintError, TargetError
from .feature import Override, Patch, Provide, matches
from .source import Fingerprint, Reader, Source, fingerprint, foreign_code, live_reader
from .target import parse, resolve

VERIFIED = "verified"


@functools.lru_cache(maxsize=1024)
def _live(target: str, source: Source | None) -> Fingerprint:
    """Fingerprint as installed; `source` is in the cache key, since files may change."""
    return fingerprint(live_reader, target)


def fingerprinted(patch: Patch) -> Iterator[str]:
    """Yield the targets to fingerprint: the patched symbol, unless provided, and `relies_on`."""
    if not isinstance(patch, Provide):
        yield patch.target
    yield from patch.relies_on


class Table:
    def __init__(self, entries: Mapping[str, Mapping[str, Fingerprint]] | None = None) -> None:
        self.entries = {version: dict(targets) for version, targets in (entries or {}).items()}

    @classmethod
    def load(cls, path: str | Path) -> Table:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls({v: {name: Fingerprint(**row) for name, row in rows.items()} for v, rows in data.items()})

    def save(self, path: str | Path) -> None:
        rows = {
            version: {target: asdict(found) for target, found in sorted(self.entries[version].items())}
            for version in sorted(self.entries, key=Version)
        }
        Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    def compare(self, patch: Patch, target: str, reader: Reader = live_reader) -> tuple[str, str]:
        """Compare source with verified releases.

        Returns:
            "verified" or the difference as a clause; and the clause again if it forbids the patch, else "".
        """
        releases = [rows for version, rows in self.entries.items() if matches(patch.versions, version)]
        known = [rows[target] for rows in releases if target in rows]
        is_exact = isinstance(patch, Override) or target in patch.relies_on
        try:
            live = _live(target, reader(parse(target)[0])) if reader is live_reader else fingerprint(reader, target)
        except (FingerprintError, SyntaxError):
            if self.may_lack(patch, target):
                return "absent, as in a verified release", ""
            difference, is_exact = "is not in the source of its module", True
        else:
            if live in known:
                return VERIFIED, ""
            if not known:
                difference, is_exact = "is in no verified release", True
            elif live.signature in {each.signature for each in known}:
                difference = "has another body than in the verified releases"
            else:
                signature = live.signature or "of a value"
                difference, is_exact = f"has the signature {signature}, unlike the verified releases", True
        return difference, difference if is_exact else ""

    def may_lack(self, patch: Patch, target: str) -> bool:
        """Whether a verified release lacks a target that the patch relies on."""
        return target in patch.relies_on and any(
            patch.target in rows and target not in rows
            for version, rows in self.entries.items()
            if matches(patch.versions, version)
        )

    def judge(self, patch: Patch) -> tuple[str, list[str]]:
        """Compare loaded code: "verified" or the first difference, and objections to the patch. Raises TargetError."""
        verdict, objections = VERIFIED, []
        for target in fingerprinted(patch):
            try:
                raw = resolve(target).raw
            except TargetError as error:
                if target == patch.target:
                    raise
                if not self.may_lack(patch, target):
                    objections.append(str(error))
                continue
            difference, objection = self.compare(patch, target)
            foreign = ""
            with contextlib.suppress(FingerprintError, SyntaxError):
                foreign = foreign_code(target, raw)
            if foreign:
                difference = foreign
                objection = foreign if isinstance(patch, Override) or target in patch.relies_on else ""
            if verdict == VERIFIED:
                verdict = difference
            if objection:
                relies = "" if target == patch.target else f", and `{patch.target}` relies on it"
                objections.append(f"`{target}` {objection}{relies}")
        return verdict, objections
