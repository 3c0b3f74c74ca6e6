"""Report of swaps and reasons as data, JSON and text."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import FeatureOutcome, Plan
    from .swaps import Swap

_COLORS = {"applied": "32", "skipped": "33", "off": "2", "fallbacks": "33", "verification": "36", "notices": "36"}
_COLUMNS = ("feature", "numerics", "backend", "targets", "flags")


@dataclass
class PatchEntry:
    target: str
    how: str
    verified: str
    holders: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        count = len(self.holders)
        also = f", {count} more holder{'s' if count > 1 else ''}" if count else ""
        return f"{self.how} {self.target} ({self.verified}{also})"


@dataclass
class Entry:
    """Outcome of one feature; `given`: flags with non-default values."""

    feature: str
    status: str
    flags: dict[str, Any]
    summary: str
    numerics: str
    reasons: list[str] = field(default_factory=list)
    patches: list[PatchEntry] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        names = {each.rpartition(":")[2] for each in self.backends}
        backend = names.pop() if len(names) == 1 else ", ".join(self.backends)
        unknown = sum(each.verified.startswith("unverified") for each in self.patches)
        count = len(self.patches)
        targets = f"{unknown} of {count} unverified" if unknown else f"{count} verified"
        return self.feature, self.numerics, backend, targets, " ".join(self.given)


@dataclass(frozen=True)
class Fallback:
    feature: str
    reason: str


@dataclass
class Verification:
    """Comparison of one operator with the original on one kind of call.

    `output_error`, `gradient_error`: largest relative distances, or None. `worst`: result closest to its bound; its
    `error` from `measured_from` ("float64", "float32" or "original") is compared with `bound`.
    """

    feature: str
    operator: str
    shape: str
    numerics: str
    against: str
    calls: int = 0
    output_error: float | None = None
    gradient_error: float | None = None
    worst: str = ""
    error: float | None = None
    bound: float | None = None
    measured_from: str = ""
    verdict: str = "ok"
    problem: str = ""

    def to_text(self) -> str:
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'} compared with {self.against}"
        distances = [
            f"{name} {error:.1e}"
            for name, error in (("output", self.output_error), ("gradients", self.gradient_error))
            if error is not None
        ]
        judged = self.numerics
        if self.bound is not None and self.error is not None:
            judged = f"{self.worst} {self.error:.1e} from {self.measured_from}, bound {self.bound:.1e}"
        parts = [calls, f"apart by {', '.join(distances)}" if distances else "", judged, self.problem]
        return f"{self.feature}, {self.operator} {self.shape}: {self.verdict} ({'; '.join(filter(None, parts))})"


@dataclass
class Report:
    """Report of one session, updated while it runs."""

    versions: dict[str, str]
    device: str
    entries: list[Entry] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    schema_version: int = 2

    def record(self, plan: Plan, swaps: Iterable[Swap]) -> None:
        holders = {(each.feature, id(each.patch)): each.holders for each in swaps}
        self.entries = [_entry(outcome, plan.settings, holders) for outcome in plan.outcomes]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return {"schema_version": found.pop("schema_version")} | found

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        if data.get("schema_version") != 2:
            raise ValueError(f"report schema {data.get('schema_version')!r} is not known; this release reads schema 2.")
        entries = [
            Entry(**{**row, "patches": [PatchEntry(**each) for each in row["patches"]]}) for row in data["entries"]
        ]
        fallbacks = [Fallback(**row) for row in data["fallbacks"]]
        verifications = [Verification(**row) for row in data["verifications"]]
        return cls(dict(data["versions"]), data["device"], entries, fallbacks, list(data["notices"]), verifications)

    def to_text(self, width: int = 100, color: bool = False, verbose: bool = False, details: str = "") -> str:
        """Active features, one line each, and notices.

        Args:
            verbose: add targets and reasons of features that are off.
            details: where to find more, for the first line.
        """

        def paint(style: str, text: str) -> str:
            return f"\x1b[{_COLORS[style]}m{text}\x1b[0m" if color else text

        fit = functools.partial(_fit, width=width)
        on, skipped, off = (
            [each for each in self.entries if each.status == status] for status in ("applied", "skipped", "off")
        )
        features = [each for each in on if each.flags]
        counts = [f"{len(features)} feature{'' if len(features) == 1 else 's'} on"]
        counts += [f"{len(skipped)} asked for and not applied"] if skipped else []
        counts += [f"{len(off)} off"] if off else []
        lines = [paint("applied", ", ".join(counts) + (f"; details: {details}" if details else ""))]
        lines += fit(", ".join(f"{a} {b}" for a, b in self.versions.items())) + fit(f"device {self.device}")
        if verbose:
            lines += [line for each in on for line in _details(each, width)]
        elif features:
            header, *rows = _table(features, width)
            lines += [paint("off", header), *rows]
        if not verbose and len(on) > len(features):
            lines += fit(f"device layer: {', '.join(each.feature for each in on if not each.flags)}")
        unrequested = [each.feature for each in off if not each.reasons]
        if unrequested and verbose:
            lines += fit("off, not asked for: " + ", ".join(unrequested))
        for style, title, texts in (
            ("skipped", f"skipped ({len(skipped)})", _reasons(skipped)),
            ("off", f"off ({len(off) - len(unrequested)})", _reasons(off) if verbose else []),
            ("fallbacks", "fallbacks", [f"{each.feature}: {each.reason}" for each in self.fallbacks]),
            ("verification", "verification", [each.to_text() for each in self.verifications]),
            ("notices", "notices", self.notices),
        ):
            if texts:
                lines += [paint(style, title), *(line for text in texts for line in fit(text, indent=2))]
        return "\n".join(lines) + "\n"


def _fit(text: str, width: int, indent: int = 0) -> list[str]:
    return _wrap(text, width, " " * indent, " " * (indent + 2))


def _wrap(text: str, width: int, first: str, further: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _table(entries: Sequence[Entry], width: int) -> list[str]:
    rows = [_COLUMNS, *(each.row() for each in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, flags in rows:
        start = "".join(f"  {cell:{size}}" for cell, size in zip(cells, widths, strict=False)) + "  "
        lines += _wrap(flags, max(width, len(start) + 20), start, " " * len(start)) or [start.rstrip()]
    return lines


def _details(entry: Entry, width: int) -> list[str]:
    details = [entry.numerics, *([f"by {', '.join(entry.backends)}"] if entry.backends else [])]
    first = "  ".join(filter(None, (entry.feature, " ".join(entry.given), f"[{'; '.join(details)}]")))
    texts = [each.to_text() for each in entry.patches]
    texts += [f"sets {name} = {value}" for name, value in entry.arguments.items()]
    return _fit(first, width, 2) + [line for text in texts for line in _fit(text, width, 4)]


def _reasons(entries: Iterable[Entry]) -> list[str]:
    return [f"{each.feature}: {'; '.join(each.reasons)}" for each in entries if each.reasons]


def _entry(outcome: FeatureOutcome, settings: Mapping[str, Any], holders: Mapping[Any, list[str]]) -> Entry:
    feature = outcome.feature
    values = [(option, settings.get(option.dest, option.default)) for option in feature.options]
    return Entry(
        feature.name,
        outcome.status,
        {option.flag: value for option, value in values},
        feature.summary,
        feature.numerics,
        list(outcome.reasons),
        [
            PatchEntry(
                each.patch.target, each.patch.kind, each.verdict, list(holders.get((feature.name, id(each.patch)), ()))
            )
            for each in outcome.steps
        ],
        dict(outcome.arguments),
        given=[
            option.flag if value is True else f"{option.flag} {_written(value)}"
            for option, value in values
            if value != option.default and _written(value) != _written(option.default)
        ],
    )


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_written, value))
    return str(getattr(value, "name", value))
