"""Known fingerprints of every target by release, and what they say of a target as it is here."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import Version

from .errors import FingerprintError
from .feature import Around, Override, matches
from .source import Fingerprint, Source, fingerprint, foreign_code, live_reader
from .target import parse

VERIFIED = "verified"


@functools.lru_cache(maxsize=1024)
def _live(target: str, source: Source | None) -> Fingerprint:
    """Of a target as installed here, read again when its module's file has changed."""
    return fingerprint(live_reader, target)


class Table:
    """Known fingerprints: release -> target -> fingerprint."""

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

    def known(self, patch: Around | Override) -> dict[str, Fingerprint]:
        """What the target looks like in each release that the patch is for."""
        return {
            version: rows[patch.target]
            for version, rows in self.entries.items()
            if patch.target in rows and matches(patch.versions, version)
        }

    def judge(self, patch: Around | Override, raw: Any) -> tuple[str, str]:
        """How well the loaded target is known, and why a patch of this kind should not be applied to it.

        Returns:
            "verified", or what is different, as a clause; and that clause again if the patch relies on it, else "".
        """
        foreign = foreign_code(patch.target, raw)
        if foreign:
            return foreign, foreign if isinstance(patch, Override) else ""
        try:
            return self.compare(patch, _live(patch.target, live_reader(parse(patch.target)[0])))
        except (FingerprintError, SyntaxError):
            return "is not in the source of its module", "is not in the source of its module"

    def compare(self, patch: Around | Override, live: Fingerprint) -> tuple[str, str]:
        """As `judge`, by what the source says."""
        known = self.known(patch)
        if not known:
            return "is in no verified release", "is in no verified release"
        if live in known.values():
            return VERIFIED, ""
        if live.signature in {each.signature for each in known.values()}:
            changed = "has another body than in the verified releases"
            return changed, changed if isinstance(patch, Override) else ""
        changed = f"has the signature {live.signature or 'of a value'}, unlike the verified releases"
        return changed, changed
