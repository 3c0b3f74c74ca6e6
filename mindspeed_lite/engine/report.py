"""Report of swaps and reasons as data and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        if data.get("schema_version") != 3:
            raise ValueError(f"report schema {data.get('schema_version')!r} is not known; this release reads schema 3.")
        entries = [
            Entry(**{**row, "patches": [PatchEntry(**each) for each in row["patches"]]}) for row in data["entries"]
        ]
        fallbacks = [Fallback(**row) for row in data["fallbacks"]]
        verifications = [Verification(**row) for row in data["verifications"]]
        return cls(dict(data["versions"]), data["device"], entries, fallbacks, list(data["notices"]), verifications)


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
