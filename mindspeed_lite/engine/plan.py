"""From features, settings and versions to an ordered list of steps; every skip carries all of its reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packaging.version import InvalidVersion, Version

from .errors import ConflictError, EngineError, PlanError, RequirementError, TargetError
from .feature import Context, Feature, Patch, Provide, Replace, Wrap, matches
from .options import Collision
from .target import DEFAULT_SKIP, Target, resolve, signature_difference, unwrap, vacancy

if TYPE_CHECKING:
    from .fingerprints import Table

T = TypeVar("T")
Status = Literal["applied", "skipped", "off"]
ALLOW_UNVERIFIED = "--mindspeed-lite-allow-unverified"
ALREADY_THERE = "already provided by the host"


@dataclass(frozen=True, eq=False)
class Step:
    """One patch as it will be applied; `value` is what a replacement puts there; a Provide has no target."""

    feature: str
    patch: Patch
    target: Target | None
    value: Any
    verified: str


@dataclass
class Outcome:
    """What became of one feature, and why."""

    feature: Feature
    status: Status
    reasons: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    adjustments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they apply, and one outcome per feature."""

    steps: tuple[Step, ...]
    outcomes: tuple[Outcome, ...]
    host_version: str
    skip_modules: Collection[str]

    def outcome(self, feature: str) -> Outcome:
        return next(each for each in self.outcomes if each.feature.name == feature)

    @property
    def adjustments(self) -> dict[str, Any]:
        """All host arguments the applied features set."""
        return {name: value for each in self.outcomes for name, value in each.adjustments.items()}


def make_plan(
    features: Iterable[Feature],
    context: Context,
    *,
    host_version: str,
    fingerprints: Table,
    session: Any,
    allow_unverified: bool = False,
    strict: bool = False,
    skip_modules: Collection[str] = (),
    collisions: Sequence[Collision] = (),
) -> Plan:
    """Decide everything, change nothing; raise EngineError if going on is not what was asked for.

    `skip_modules` are top-level names besides the standard library that hold nothing of the host by value.
    """
    try:
        Version(host_version)
    except InvalidVersion as error:
        raise PlanError(f"host version `{host_version}` is not a version number.") from error
    everything = {feature.name: feature for feature in sorted(features, key=lambda each: each.name)}
    enabled = {name: each for name, each in everything.items() if each.is_enabled(context.settings)}
    _refuse_collisions(enabled, collisions)
    _refuse_conflicts(enabled)
    judge = _Judge(context, host_version, fingerprints, session, allow_unverified)
    outcomes = {
        name: judge.outcome(feature) if name in enabled else Outcome(feature, "off")
        for name, feature in everything.items()
    }
    _skip_dependents(outcomes)
    applied = [each for each in outcomes.values() if each.status == "applied"]
    _refuse_double_replacement(applied)
    _collect_adjustments(applied, context)
    skipped = [each for each in outcomes.values() if each.status == "skipped"]
    if strict and skipped:
        listed = "; ".join(f"feature {each.feature.label}: {', '.join(each.reasons)}" for each in skipped)
        raise PlanError(f"strict mode allows no skipped feature: {listed}.")
    steps = sorted((step for each in applied for step in each.steps), key=_rank)
    return Plan(tuple(steps), tuple(outcomes.values()), host_version, DEFAULT_SKIP.union(skip_modules))


def _rank(step: Step) -> tuple[int, int, str]:
    """Symbols first, since a replacement may use them; then replacements, then wraps from the inside out."""
    return ("provide", "replace", "wrap").index(step.patch.how), step.patch.order, step.feature


def _refuse_collisions(enabled: Mapping[str, Feature], collisions: Sequence[Collision]) -> None:
    for each in collisions:
        if each.feature in enabled:
            raise PlanError(
                f"feature {enabled[each.feature].label}: {each.flag} means something else in this host; "
                "leave the feature off, or use a release of this package that knows this host version."
            )


def _refuse_conflicts(enabled: Mapping[str, Feature]) -> None:
    for feature in enabled.values():
        for relation in feature.conflicts:
            if relation.feature in enabled:
                other = enabled[relation.feature]
                raise ConflictError(
                    f"features {feature.label} and {other.label} conflict: {relation.reason}; turn one off."
                )
        for relation in feature.requires:
            if relation.feature not in enabled:
                raise RequirementError(
                    f"feature {feature.label} requires feature `{relation.feature}`, which is off: "
                    f"{relation.reason}; turn it on too."
                )


def _skip_dependents(outcomes: Mapping[str, Outcome]) -> None:
    changed = True
    while changed:
        changed = False
        for outcome in outcomes.values():
            for relation in outcome.feature.requires if outcome.status != "off" else ():
                reason = f"requires feature `{relation.feature}`, which was skipped"
                if outcomes[relation.feature].status == "skipped" and reason not in outcome.reasons:
                    outcome.status, outcome.steps, changed = "skipped", [], True
                    outcome.reasons.append(reason)


def _refuse_double_replacement(applied: Sequence[Outcome]) -> None:
    sole = [
        (each.feature, step)
        for each in applied
        for step in each.steps
        if not isinstance(step.patch, Wrap) and step.verified != ALREADY_THERE
    ]
    for (one, step), (other, second) in combinations(sole, 2):
        if one is not other and _place(step) == _place(second):
            raise ConflictError(
                f"features {one.label} and {other.label} both {step.patch.how} `{step.patch.target}`; turn one off."
            )


def _place(step: Step) -> Any:
    if step.target is None:
        return step.patch.target
    # Two targets may be two names of one object.
    return id(step.target.raw) if step.target.is_shared else (id(step.target.owner), step.target.name)


def _collect_adjustments(applied: Sequence[Outcome], context: Context) -> None:
    setter: dict[str, Outcome] = {}
    for outcome in applied:
        if outcome.feature.adjust is None:
            continue
        outcome.adjustments = dict(_ask(outcome.feature, "adjust", outcome.feature.adjust, context))
        for name, value in outcome.adjustments.items():
            other = setter.setdefault(name, outcome)
            if other.adjustments[name] != value:
                raise ConflictError(
                    f"features {other.feature.label} and {outcome.feature.label} set host argument `{name}` "
                    f"to {other.adjustments[name]!r} and {value!r}; turn one off."
                )


def _ask(feature: Feature, what: str, question: Callable[[Any], T], argument: Any) -> T:
    try:
        return question(argument)
    except EngineError:
        raise
    except Exception as error:
        raise PlanError(
            f"feature {feature.label}: {what} failed with {type(error).__name__}: {error}; "
            "turn the feature off or report this."
        ) from error


@dataclass
class _Judge:
    """Judges one feature at a time against the host as it is."""

    context: Context
    host_version: str
    fingerprints: Table
    session: Any
    allow_unverified: bool

    def outcome(self, feature: Feature) -> Outcome:
        reasons: list[str] = []
        if feature.condition is not None:
            answer = _ask(feature, "condition", feature.condition, self.context)
            # A single text is a sequence of texts too: its letters.
            reasons += filter(None, [answer] if isinstance(answer, str) else answer)
        chosen = self._variants(feature, reasons)
        unresolved: list[TargetError] = []
        steps: list[Step] = []
        for patch in chosen:
            try:
                steps.append(self._step(feature, patch, reasons))
            except TargetError as error:
                unresolved.append(error)
        if unresolved and not reasons:
            raise TargetError(
                f"feature {feature.label} does not fit host version {self.host_version}: "
                f"{unresolved[0]} Turn it off, or use a release of this package that knows this version."
            ) from unresolved[0]
        reasons += [str(error) for error in unresolved]
        return Outcome(feature, "skipped" if reasons else "applied", reasons, [] if reasons else steps)

    def _variants(self, feature: Feature, reasons: list[str]) -> list[Patch]:
        variants: dict[str, list[Patch]] = {}
        for patch in feature.patches:
            variants.setdefault(patch.variant_of or patch.target, []).append(patch)
        chosen: list[Patch] = []
        for target, group in variants.items():
            fitting = [patch for patch in group if matches(patch.versions, self.host_version)]
            if not fitting:
                ranges = ", ".join(patch.versions for patch in group)
                reasons.append(f"no variant of `{target}` for host version {self.host_version} (there is {ranges})")
            if sum(isinstance(patch, Replace) for patch in fitting) > 1:
                raise PlanError(
                    f"feature {feature.label} has two replacements of `{target}` for host version "
                    f"{self.host_version}; report this."
                )
            chosen += fitting
        return chosen

    def _step(self, feature: Feature, patch: Patch, reasons: list[str]) -> Step:
        if isinstance(patch, Provide):
            provided = "provided" if vacancy(patch.target) else ALREADY_THERE
            return Step(feature.name, patch, None, None, provided)
        target = resolve(patch.target)
        verified = self._verified(patch, reasons)
        value = None
        if isinstance(patch, Replace):
            value = patch.replacement
            if patch.bind and not reasons:
                value = _ask(feature, f"binding `{patch.target}`", value, self.session)
            if (not patch.bind or not reasons) and (target.kind != "value" or callable(target.raw)):
                different = signature_difference(target.raw, unwrap(value), bound=target.is_bound)
                reasons += [f"`{patch.target}`: {clause}" for clause in different]
        return Step(feature.name, patch, target, value, verified)

    def _verified(self, patch: Replace | Wrap, reasons: list[str]) -> str:
        verdict = self.fingerprints.verdict(patch.target, self.host_version)
        if verdict == "verified":
            return verdict
        # A wrap hands its arguments on, so the signature is all it rests on.
        if not self.allow_unverified and (verdict != "same_signature" or isinstance(patch, Replace)):
            found = {
                "unknown": "is not known",
                "changed": "has another signature",
                "same_signature": "has changed",
            }
            reasons.append(
                f"`{patch.target}` {found[verdict]} in host version {self.host_version}, not verified for "
                f"{patch.how} (pass {ALLOW_UNVERIFIED} to use it all the same)"
            )
        return "unverified"
