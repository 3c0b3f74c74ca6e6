"""Known fingerprints by release, and their comparison with the installed host."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import Version

from .errors import FingerprintError, TargetError
from .feature import Override, Patch, Provide, matches
from .source import Fingerprint, Source, fingerprint, foreign_code, live_reader
from .target import parse, resolve

VERIFIED = "verified"


@functools.lru_cache(maxsize=1024)
def _live(target: str, source: Source | None) -> Fingerprint:
    """Fingerprint as installed; `source` is in the cache key, since files may change."""
    return fingerprint(live_reader, target)


def fingerprinted(patches: Iterable[Patch]) -> Iterator[tuple[Patch, str]]:
    """Each patch with every fingerprinted target: its own and those it relies on."""
    for patch in patches:
        if not isinstance(patch, Provide):
            yield patch, patch.target
        yield from ((patch, text) for text in patch.relies_on)


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

    # Below, `text` is a target that the patch relies on, "" for its own.

    def known(self, patch: Patch, text: str = "") -> dict[str, Fingerprint]:
        text = text or patch.target
        return {
            version: rows[text]
            for version, rows in self.entries.items()
            if text in rows and matches(patch.versions, version)
        }

    def may_lack(self, patch: Patch, text: str) -> bool:
        return text in patch.relies_on and bool(self.known(patch).keys() - self.known(patch, text).keys())

    def judge(self, patch: Patch, raw: Any, text: str = "") -> tuple[str, str]:
        """Compare loaded code with verified releases.

        Returns:
            "verified" or the difference as a clause; and the clause again if it forbids the patch, else "".
        """
        text = text or patch.target
        foreign = foreign_code(text, raw)
        if foreign:
            return foreign, foreign if isinstance(patch, Override) or text in patch.relies_on else ""
        try:
            return self.compare(patch, _live(text, live_reader(parse(text)[0])), text)
        except (FingerprintError, SyntaxError):
            return "is not in the source of its module", "is not in the source of its module"

    def doubts(self, patch: Patch) -> Iterator[str]:
        for text in patch.relies_on:
            try:
                objection = self.judge(patch, resolve(text).raw, text)[1]
            except TargetError as error:
                if not self.may_lack(patch, text):
                    yield str(error)
                continue
            if objection:
                yield f"`{text}` {objection}, and `{patch.target}` relies on it"

    def compare(self, patch: Patch, live: Fingerprint, text: str = "") -> tuple[str, str]:
        known = self.known(patch, text)
        if not known:
            return "is in no verified release", "is in no verified release"
        if live in known.values():
            return VERIFIED, ""
        if live.signature in {each.signature for each in known.values()}:
            changed = "has another body than in the verified releases"
            return changed, changed if isinstance(patch, Override) or text in patch.relies_on else ""
        changed = f"has the signature {live.signature or 'of a value'}, unlike the verified releases"
        return changed, changed
