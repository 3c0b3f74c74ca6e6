"""What was swapped, what was not and why, as data; text and JSON are views of it."""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
    """One feature: what the user asked for, what came of it, and why; `given`: flags that are not at their default."""

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

    def backend(self) -> str:
        """What serves its operators: one name where all agree."""
        names = {each.rpartition(":")[2] for each in self.backends}
        return names.pop() if len(names) == 1 else ", ".join(self.backends)

    def standing(self) -> str:
        """How well its targets are known: their number, and how many are not verified."""
        unknown = sum(each.verified.startswith("unverified") for each in self.patches)
        return f"{unknown} of {len(self.patches)} unverified" if unknown else f"{len(self.patches)} verified"


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

    def to_text(self, width: int = 100, color: bool = False, verbose: bool = False, details: str = "") -> str:
        """What is on, one line a feature, and what the user must know; with `verbose` targets and every reason.

        details: where the rest is, for the first line.
        """
        paint = functools.partial(_paint, color=color)
        on, skipped, off = ([each for each in self.entries if each.status == status] for status in _STATUSES)
        features = [each for each in on if each.flags]
        counts = [f"{len(features)} feature{'' if len(features) == 1 else 's'} on"]
        counts += [f"{len(skipped)} asked for and not applied"] if skipped else []
        counts += [f"{len(off)} off"] if off else []
        first = ", ".join(counts) + (f"; details: {details}" if details else "")
        lines = [paint("applied", first), *_fit(", ".join(f"{a} {b}" for a, b in self.versions.items()), 0, width)]
        lines += _fit(f"device {self.device}", 0, width)
        lines += _targets(on, width) if verbose else _table(features, width, color)
        if not verbose and len(on) > len(features):
            names = ", ".join(each.feature for each in on if not each.flags)
            lines += _fit(f"device layer: {names}", 0, width)
        for title, entries in (("skipped", skipped), ("off", [each for each in off if each.reasons and verbose])):
            if entries:
                lines.append(paint(title, f"{title} ({len(entries)})"))
                lines += [line for each in entries for line in _reasons(each, width)]
        without = [each.feature for each in off if not each.reasons]
        if without and verbose:
            lines += _fit("off, not asked for: " + ", ".join(without), 0, width)
        for title, texts in (
            ("fallbacks", [f"{each.feature}: {each.reason}" for each in self.fallbacks]),
            ("verification", [each.to_text() for each in self.verifications]),
            ("notices", self.notices),
        ):
            if texts:
                lines += [paint(title, title), *(line for text in texts for line in _fit(text, 2, width))]
        return "\n".join(lines) + "\n"


_STATUSES = ("applied", "skipped", "off")
_COLUMNS = ("feature", "numerics", "backend", "targets", "flags")


def _paint(style: str, text: str, color: bool) -> str:
    return f"\x1b[{_COLORS[style]}m{text}\x1b[0m" if color else text


def _fit(text: str, indent: int, width: int, hanging: int | None = None) -> list[str]:
    """`text` wrapped between words; a symbol longer than a line is parted after a dot or colon."""
    further = indent + 2 if hanging is None else hanging
    words = [piece for word in text.split() for piece in _pieces(word, width - further)]
    return textwrap.wrap(
        " ".join(words),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * further,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _pieces(word: str, columns: int) -> list[str]:
    pieces = [""]
    for part in re.findall(r"[^.:]*[.:]*", word) if len(word) > columns else [word]:
        if pieces[-1] and len(pieces[-1]) + len(part) > columns:
            pieces.append("")
        pieces[-1] += part
    return pieces


def _table(entries: Sequence[Entry], width: int, color: bool) -> list[str]:
    """One line a feature; only flags that do not fit go on in a further one."""
    if not entries:
        return []
    rows = [(each.feature, each.numerics, each.backend(), each.standing(), " ".join(each.given)) for each in entries]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    # Where it leaves flags no room, they stand under the name.
    left = sum(widths[:-1]) + 2 * len(widths)
    hanging = left if width - left >= max(len(word) for row in rows for word in [*row[-1].split(), "flags"]) else 4
    lines = []
    for row in (_COLUMNS, *rows):
        cells = "  ".join(cell.ljust(size) for cell, size in zip(row[:-1], widths[:-1], strict=True))
        rest = _fit(row[-1], hanging, width, hanging)
        if hanging == left and rest:
            lines += [f"  {cells}  {rest[0].lstrip()}", *rest[1:]]
        else:
            lines += [f"  {cells}".rstrip(), *(rest if row is not _COLUMNS else [])]
    return [_paint("off", lines[0], color), *lines[1:]]


def _targets(entries: Iterable[Entry], width: int) -> list[str]:
    lines = []
    for entry in entries:
        details = [entry.numerics, *([f"by {', '.join(entry.backends)}"] if entry.backends else [])]
        lines += _fit(
            "  ".join(filter(None, (entry.feature, " ".join(entry.given), f"[{'; '.join(details)}]"))), 2, width
        )
        lines += [line for patch in entry.patches for line in _fit(_patch_text(patch), 4, width)]
        for name, value in entry.arguments.items():
            lines += _fit(f"sets {name} = {value}", 4, width)
    return lines


def _reasons(entry: Entry, width: int) -> list[str]:
    return _fit(f"{entry.feature}: {'; '.join(entry.reasons)}", 2, width)


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
        given=[
            option.flag if value is True else f"{option.flag} {_written(value)}"
            for option in feature.options
            if (value := settings.get(option.dest, option.default)) != option.default
            and _written(value) != _written(option.default)
        ],
    )


def _written(value: Any) -> str:
    """As a user writes it on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_written, value))
    return str(getattr(value, "name", value))
