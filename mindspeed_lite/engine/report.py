"""Report of swaps and reasons as data, JSON and text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_lite import text_layout
from mindspeed_lite.text_layout import painted, wrapped

from .feature import given_flags

if TYPE_CHECKING:
    from .plan import FeatureOutcome, Plan


@dataclass
class PatchEntry:
    target: str
    how: str
    verified: str


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
    schema_version: int = 3

    def record(self, plan: Plan) -> None:
        self.entries = [_entry(outcome, plan.settings) for outcome in plan.outcomes]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return {"schema_version": found.pop("schema_version")} | found

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def write(self, path: Path) -> None:
        """Write to a file: text where its name ends in .txt, else JSON."""
        path.write_text(self.to_text(verbose=True) if path.suffix == ".txt" else self.to_json() + "\n")

    def to_text(self, width: int = 80, color: bool = False, verbose: bool = False, details: str = "") -> str:
        """Active features, one line each, and notices.

        Args:
            verbose: add targets and reasons of features that are off.
            details: where to find more, for the first line.
        """
        lines: list[str] = []

        def section(style: str, title: str, texts: Iterable[str], indent: int = 2) -> None:
            texts = list(filter(None, texts))
            if title and texts:
                lines.extend(painted(each, style, color) for each in wrapped(title, width))
            for text in texts:
                lines.extend(wrapped(text, width, indent))

        on, skipped, off = (
            [each for each in self.entries if each.status == status] for status in ("applied", "skipped", "off")
        )
        features, device_layer = [each for each in on if each.flags], [each for each in on if not each.flags]
        unrequested = [each.feature for each in off if not each.reasons]
        counts = [f"{len(features)} feature{'' if len(features) == 1 else 's'} on"]
        counts += [f"{len(skipped)} asked for and not applied"] if skipped else []
        counts += [f"{len(off)} off"] if off else []
        about = [", ".join(f"{name} {version}" for name, version in self.versions.items()), f"device {self.device}"]
        section("green", ", ".join(counts) + (f"; details: {details}" if details else ""), about, indent=0)
        if verbose:
            for each in on:
                section("", "", [_heading(each)])
                section("", "", _details(each), indent=4)
            section("", "off, not asked for", [", ".join(unrequested)])
        else:
            headers = ["feature", "numerics", "backend", "targets", "flags"]
            rows = [[each.feature, each.numerics, _backend(each), _targets(each), _flags(each)] for each in features]
            shown = slice(None if any(row[-1] for row in rows) else -1)
            style = (lambda cell: "") if color else None
            table = text_layout.table(headers[shown], [row[shown] for row in rows], width - 2, style)
            lines += [f"  {line}" for line in table]
            if device_layer:
                device = self.device.partition(" ")[0]
                section(
                    "", "", [f"device layer: {len(device_layer)} changes that let Megatron run on {device}"], indent=0
                )
        section("yellow", f"skipped ({len(skipped)})", _reasons(skipped))
        section("dim", f"off ({len(off) - len(unrequested)})", _reasons(off) if verbose else _first_reasons(off))
        section("yellow", "fallbacks", [f"{each.feature}: {each.reason}" for each in self.fallbacks])
        section("cyan", "verification", [each.to_text() for each in self.verifications])
        section("cyan", "notices", self.notices)
        return "".join(f"{line}\n" for line in lines)


def _backend(entry: Entry) -> str:
    names = {each.rpartition(":")[2] for each in entry.backends}
    return names.pop() if len(names) == 1 else ", ".join(entry.backends)


def _targets(entry: Entry) -> str:
    unknown = sum(each.verified.startswith("unverified") for each in entry.patches)
    count = len(entry.patches)
    return f"{unknown} of {count} unverified" if unknown else f"{count} verified"


def _flags(entry: Entry) -> str:
    """Given flags, but for one that only repeats the feature's name."""
    return " ".join(each for each in entry.given if each[2:].replace("-", "_") != entry.feature)


def _heading(entry: Entry) -> str:
    backends = f"; by {', '.join(entry.backends)}" if entry.backends else ""
    return " ".join([entry.feature, *entry.given, f"[{entry.numerics}{backends}]"])


def _details(entry: Entry) -> list[str]:
    return [
        *(f"{each.target} ({each.verified}), {each.how}" for each in entry.patches),
        *(f"sets {name} = {value}" for name, value in entry.arguments.items()),
    ]


def _reasons(entries: Iterable[Entry]) -> list[str]:
    return [f"{each.feature}: {'; '.join(each.reasons)}" for each in entries if each.reasons]


def _first_reasons(entries: Iterable[Entry]) -> list[str]:
    """The first reason of each feature, once for all that share it."""
    features: dict[str, list[str]] = {}
    for each in entries:
        if each.reasons:
            features.setdefault(each.reasons[0], []).append(each.feature)
    return [f"{', '.join(names)}: {reason}" for reason, names in features.items()]


def _entry(outcome: FeatureOutcome, settings: Mapping[str, Any]) -> Entry:
    feature = outcome.feature
    values = [(option, settings.get(option.dest, option.default)) for option in feature.options]
    return Entry(
        feature.name,
        outcome.status,
        {option.flag: value for option, value in values},
        feature.summary,
        feature.numerics,
        list(outcome.reasons),
        [PatchEntry(each.patch.target, each.patch.kind, each.verdict) for each in outcome.steps],
        dict(outcome.arguments),
        given=given_flags(feature.options, settings),
    )
