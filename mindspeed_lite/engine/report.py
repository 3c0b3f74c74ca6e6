"""What was swapped, what was not and why, as data; text and JSON are views of it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Outcome, Plan
    from .swaps import Swap

_COLORS = {"applied": "32", "skipped": "33", "off": "2", "fallbacks": "33", "verification": "36", "notices": "36"}


@dataclass
class PatchEntry:
    """One patch in place: how well its target is known, and which other names of a value were moved along."""

    target: str
    how: str
    verified: str
    holders: list[str] = field(default_factory=list)


@dataclass
class Entry:
    """One feature: what the user asked for, what came of it, and why."""

    feature: str
    status: str
    flags: dict[str, Any]
    summary: str
    numerics: str
    reasons: list[str] = field(default_factory=list)
    patches: list[PatchEntry] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fallback:
    """A feature that stepped aside at run time."""

    feature: str
    reason: str


@dataclass
class Verification:
    """One operator on one kind of call: how far its first calls were from the original run beside them.

    `output_error` and `gradient_error` are the largest relative distances from the original, None where there was
    none to measure. `worst` is the result that came nearest to its bound, `error` what was held against `bound`
    there, and `measured_from` says from where: "float64" or "original".
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
        """One line: what was compared, how far apart the two are, and the judgement."""
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'} beside {self.against}"
        apart = [
            f"{name} {error:.1e}"
            for name, error in (("output", self.output_error), ("gradients", self.gradient_error))
            if error is not None
        ]
        judged = self.numerics
        if self.bound is not None and self.error is not None:
            judged = f"{self.worst} {self.error:.1e} from {self.measured_from}, bound {self.bound:.1e}"
        parts = [calls, f"apart by {', '.join(apart)}" if apart else "", judged, self.problem]
        return f"{self.feature}, {self.operator} {self.shape}: {self.verdict} ({'; '.join(filter(None, parts))})"


@dataclass
class Report:
    """One session's story, growing as it runs."""

    versions: dict[str, str]
    device: str
    entries: list[Entry] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    schema_version: int = 2

    def record(self, plan: Plan, swaps: Iterable[Swap]) -> None:
        """Take the entries from a plan, and from its swaps what was really moved."""
        by_patch = {(each.feature, id(each.patch)): each for each in swaps}
        self.entries = [_entry(outcome, plan.settings, by_patch) for outcome in plan.outcomes]

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, the same that come back from JSON."""
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

    def to_text(self, width: int = 100, color: bool = False) -> str:
        """A screenful for a person: applied with targets, skipped with reasons, the rest by name."""

        def fit(text: str, indent: int) -> list[str]:
            subsequent = " " * (indent + 2)
            return textwrap.wrap(
                text, width, initial_indent=" " * indent, subsequent_indent=subsequent, break_on_hyphens=False
            )

        def heading(name: str, rest: str = "") -> str:
            return (f"\x1b[{_COLORS[name]}m{name}\x1b[0m" if color else name) + rest

        versions = [f"{name} {version}" for name, version in self.versions.items()]
        lines = fit(", ".join([*versions, f"device {self.device}"]), 0)
        by_status = {each: [entry for entry in self.entries if entry.status == each] for each in _COLORS}
        for status in ("applied", "skipped"):
            if by_status[status]:
                lines.append(heading(status, f" ({len(by_status[status])})"))
            for entry in by_status[status]:
                flags = " ".join(flag if value is True else f"{flag}={value}" for flag, value in entry.flags.items())
                details = [entry.numerics, *([f"by {', '.join(entry.backends)}"] if entry.backends else [])]
                lines += fit("  ".join(filter(None, (entry.feature, flags, f"[{'; '.join(details)}]"))), 2)
                lines += [line for reason in entry.reasons for line in fit(f"- {reason}", 4)]
                lines += [line for patch in entry.patches for line in fit(_patch_text(patch), 4)]
                for name, value in entry.arguments.items():
                    lines += fit(f"sets {name} = {value}", 4)
        left_off = [entry for entry in by_status["off"] if entry.reasons]
        if left_off:
            lines.append(heading("off", f", left off by auto ({len(left_off)})"))
            lines += [line for each in left_off for line in fit(f"{each.feature}: {'; '.join(each.reasons)}", 2)]
        off = [entry.feature for entry in by_status["off"] if not entry.reasons]
        if off:
            # The length of the word is that of the text, not of its color codes.
            text = fit("off: " + ", ".join(off), 0)
            lines += [heading("off") + text[0][len("off") :], *text[1:]]
        for name, texts in (
            ("fallbacks", [f"{each.feature}: {each.reason}" for each in self.fallbacks]),
            ("verification", [each.to_text() for each in self.verifications]),
            ("notices", self.notices),
        ):
            if texts:
                lines += [heading(name), *(line for text in texts for line in fit(text, 2))]
        return "\n".join(lines) + "\n"


def _patch_text(patch: PatchEntry) -> str:
    count = len(patch.holders)
    also = f", {count} more holder{'s' if count > 1 else ''}" if count else ""
    return f"{patch.how} {patch.target} ({patch.verified}{also})"


def _entry(outcome: Outcome, settings: Mapping[str, Any], swaps: Mapping[Any, Swap]) -> Entry:
    feature = outcome.feature
    patches = []
    for step in outcome.steps:
        swap = swaps.get((feature.name, id(step.patch)))
        patches.append(
            PatchEntry(step.patch.target, step.patch.kind, step.verdict, [] if swap is None else list(swap.holders))
        )
    return Entry(
        feature.name,
        outcome.status,
        {option.flag: settings.get(option.dest, option.default) for option in feature.options},
        feature.summary,
        feature.numerics,
        list(outcome.reasons),
        patches,
        dict(outcome.arguments),
    )
