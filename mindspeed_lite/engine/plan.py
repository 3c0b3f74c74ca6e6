"""Decides which features apply, with reasons; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packaging.version import InvalidVersion, Version

from .errors import ConflictError, EngineError, PlanError, RequirementError, TargetError
from .feature import Context, Feature, Patch, Provide, Settings
from .source import has_attribute, mentions
from .swaps import provided
from .target import parse, resolve, vacancy

if TYPE_CHECKING:
    from .fingerprints import Table

T = TypeVar("T")
ALLOW_UNVERIFIED = "--mindspeed-lite-allow-unverified"


@dataclass(frozen=True, eq=False)
class PlannedPatch:
    patch: Patch
    verdict: str


@dataclass
class FeatureOutcome:
    """Outcome of one feature; reasons of an off feature are auto's."""

    feature: Feature
    is_requested: bool = False
    status: Literal["applied", "skipped", "off"] = "off"
    reasons: list[str] = field(default_factory=list)
    steps: list[PlannedPatch] = field(default_factory=list)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def drop(self, reasons: Iterable[str]) -> None:
        self.status = "skipped" if self.is_requested else "off"
        self.reasons = [*self.reasons, *reasons]
        self.steps, self.arguments = [], {}


@dataclass(frozen=True)
class Plan:
    outcomes: tuple[FeatureOutcome, ...]
    settings: Settings

    def outcome(self, feature: str) -> FeatureOutcome:
        return next(each for each in self.outcomes if each.feature.name == feature)

    @property
    def applied(self) -> list[FeatureOutcome]:
        return [each for each in self.outcomes if each.status == "applied"]


def make_plan(
    features: Iterable[Feature],
    context: Context,
    *,
    host_version: str,
    fingerprints: Table | None,
    auto: bool = False,
    strict: bool = False,
    allow_unverified: bool = False,
    without: Mapping[str, str] | None = None,
    sets_arguments: bool = True,
) -> Plan:
    """Decide on every feature. Raises EngineError if the request contradicts itself or the host.

    Args:
        fingerprints: of verified releases; None: do not examine targets, no patches.
        auto: also enable applicable features; these never raise.
        strict: raise if a requested feature does not apply.
        without: features excluded for a given reason.
        sets_arguments: whether the caller sets features' arguments; otherwise argument-only features need them set.
    """
    try:
        Version(host_version)
    except InvalidVersion as error:
        raise PlanError(f"host version `{host_version}` is not a version number.") from error
    outcomes = {
        each.name: FeatureOutcome(each, each.is_enabled(context.settings))
        for each in sorted(features, key=lambda each: each.name)
    }
    planner = _Planner(outcomes, context, host_version, fingerprints, allow_unverified, without or {})
    requested = [each for each in outcomes.values() if each.is_requested]
    if auto:
        planner.choose()
    for each in requested:
        planner.refuse_contradictions(each.feature)
    for each in requested:
        planner.judge(each, planner.conditions(each.feature))
    planner.drop_dependents()
    # Requested ones first, so that automatic ones give way.
    settled: list[FeatureOutcome] = []
    for each in [*requested, *(each for each in outcomes.values() if not each.is_requested)]:
        if each.status == "applied":
            planner.settle(each, settled, sets_arguments)
    planner.drop_dependents()
    skipped = [each for each in outcomes.values() if each.status == "skipped"]
    if strict and skipped:
        listed = "; ".join(f"feature {each.feature.label}: {', '.join(each.reasons)}" for each in skipped)
        raise PlanError(f"strict mode allows no skipped feature: {listed}.")
    return Plan(tuple(outcomes.values()), planner.context.settings)


def automatic_reasons(features: Iterable[Feature], context: Context) -> dict[str, list[str]]:
    """Map each feature to the reasons why auto leaves it off, given what it requires."""
    outcomes = {each.name: FeatureOutcome(each) for each in features}
    planner = _Planner(outcomes, context, "0", None, True, {})
    return {
        name: planner.automatic_reasons(each.feature, {relation.feature for relation in each.feature.requires})
        for name, each in outcomes.items()
    }


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
class _Planner:
    outcomes: Mapping[str, FeatureOutcome]
    context: Context
    host_version: str
    fingerprints: Table | None
    allow_unverified: bool
    without: Mapping[str, str]

    @property
    def enabled(self) -> set[str]:
        return {name for name, each in self.outcomes.items() if each.is_requested or each.status == "applied"}

    def choose(self) -> None:
        for outcome in sorted(self.outcomes.values(), key=lambda each: len(each.feature.requires)):
            if outcome.is_requested:
                continue
            feature = outcome.feature
            try:
                self.judge(outcome, self.automatic_reasons(feature, self.enabled))
            except EngineError as error:
                outcome.drop([str(error)])
            if outcome.status == "applied":
                values = {**self.context.settings, feature.options[0].dest: True}
                self.context = replace(self.context, settings=Settings(values))

    def automatic_reasons(self, feature: Feature, enabled: set[str]) -> list[str]:
        """Why auto leaves a feature off, without reading host code."""
        try:
            reasons = self.conditions(feature)
        except EngineError as error:
            reasons = [str(error)]
        if feature.not_auto:
            reasons.append(feature.not_auto)
        elif not feature.options or not feature.options[0].is_switch:
            reasons.append("it needs a value that only the user can choose")
        reasons += [f"conflicts with {name}: {reason}" for name, reason in self._conflicts(feature, enabled).items()]
        reasons += [
            f"requires {each.feature}: {each.reason}" for each in feature.requires if each.feature not in enabled
        ]
        return reasons

    def conditions(self, feature: Feature) -> list[str]:
        """Why a feature does not apply here, requested or not, without reading host code."""
        context = self.context.of(feature.name)
        reasons = [self.without.get(feature.name, ""), *feature.conflict_reasons(context.arg)]
        if feature.condition is not None:
            answer = _ask(feature, "condition", feature.condition, context)
            reasons += [answer] if isinstance(answer, str) else answer
        return list(dict.fromkeys(filter(None, reasons)))

    def _conflicts(self, feature: Feature, enabled: set[str]) -> dict[str, str]:
        own = {each.feature: each.reason for each in feature.conflicts}
        theirs = {
            name: each.reason
            for name, other in self.outcomes.items()
            for each in other.feature.conflicts
            if each.feature == feature.name
        }
        return {name: reason for name, reason in (theirs | own).items() if name in enabled}

    def refuse_contradictions(self, feature: Feature) -> None:
        for name, reason in self._conflicts(feature, self.enabled).items():
            raise ConflictError(
                f"features {feature.label} and {self.outcomes[name].feature.label} conflict: {reason}; turn one off."
            )
        missing = [each for each in feature.requires if each.feature not in self.enabled]
        if missing:
            listed = ", and ".join(f"feature `{each.feature}`, which is off: {each.reason}" for each in missing)
            raise RequirementError(f"feature {feature.label} requires {listed}; turn it on too.")

    def judge(self, outcome: FeatureOutcome, reasons: list[str]) -> None:
        """Apply a feature unless there are reasons or its targets are not those it knows."""
        feature = outcome.feature
        if reasons and not outcome.is_requested:
            outcome.drop(reasons)
            return
        patches, unsupported = feature.patches_for(self.host_version)
        reasons += unsupported
        doubts: list[str] = []
        absent: list[TargetError] = []
        for patch in patches if self.fingerprints is not None else ():
            try:
                verdict, found = self._examine(patch)
                outcome.steps.append(PlannedPatch(patch, verdict))
                doubts += found
            except TargetError as error:
                absent.append(error)
        if doubts and not self.allow_unverified:
            doubts[-1] += (
                f" (`mindspeed-lite features {feature.name} --diff` shows what differs in host version "
                f"{self.host_version}, {ALLOW_UNVERIFIED} applies the feature all the same)"
            )
            reasons += doubts
        if absent and outcome.is_requested and not reasons:
            raise TargetError(
                f"feature {feature.label} does not fit host version {self.host_version}: "
                f"{absent[0]} Turn it off, or use a release of this package that knows this version."
            ) from absent[0]
        outcome.status = "applied"
        reasons += map(str, absent)
        if reasons:
            outcome.drop(reasons)

    def _examine(self, patch: Patch) -> tuple[str, list[str]]:
        fingerprints = self.fingerprints
        assert fingerprints is not None
        verdict, doubts = fingerprints.judge(patch)
        if isinstance(patch, Provide):
            module, path = parse(patch.target)
            is_vacant = (provided(patch.target) or vacancy(patch.target)) is not None
            verdict = "provided" if is_vacant else "already provided by the host"
            if is_vacant and not mentions(module, path[-1]):
                doubts.append(f"`{patch.target}`: nothing in `{module}` looks for it")
        else:
            owner = resolve(patch.target).owner
            missing = (self._missing(text, patch.target, owner) for text in patch.reads)
            doubts += [f"`{patch.target}`: {each}" for each in missing if each]
            verdict = verdict if verdict == "verified" else f"unverified: {verdict}"
        return verdict, [f"{each} ({patch.kind})" for each in doubts]

    def _missing(self, text: str, target: str, owner: Any) -> str:
        module, colon, path = text.rpartition(":")
        holder, _, name = path.rpartition(".")
        if colon or holder or not isinstance(owner, type):
            try:
                owner = resolve(f"{module if colon else parse(target)[0]}:{holder or name}").raw
            except TargetError as error:
                return str(error)
            if not holder:
                return ""
        if isinstance(owner, type) and not has_attribute(owner, name):
            return f"`{owner.__module__}.{owner.__qualname__}` has no attribute `{name}`, which the patch reads"
        return ""

    def settle(self, outcome: FeatureOutcome, settled: list[FeatureOutcome], sets_arguments: bool) -> None:
        """Collect a feature's arguments; refuse or drop contradictions with settled ones."""
        feature = outcome.feature
        try:
            if feature.arguments is not None:
                context = self.context.of(feature.name)
                outcome.arguments = dict(_ask(feature, "arguments", feature.arguments, context))
            for other in settled:
                self._refuse_overlap(outcome, other)
        except EngineError as error:
            if outcome.is_requested:
                raise
            outcome.drop([str(error)])
            return
        missing = [
            f"{name} = {value!r}" for name, value in outcome.arguments.items() if self.context.arg(name) != value
        ]
        if missing and not outcome.steps and not sets_arguments:
            outcome.drop([f"it only sets {', '.join(missing)}, which are left to you here: set them yourself"])
        else:
            settled.append(outcome)

    def _refuse_overlap(self, outcome: FeatureOutcome, other: FeatureOutcome) -> None:
        both = f"features {other.feature.label} and {outcome.feature.label}"
        symbols = [
            {step.patch.target for step in each.steps if isinstance(step.patch, Provide)} for each in (outcome, other)
        ]
        for target in symbols[0] & symbols[1]:
            raise ConflictError(f"{both} both provide `{target}`; turn one off.")
        for name, value in outcome.arguments.items():
            if other.arguments.get(name, value) != value:
                raise ConflictError(
                    f"{both} set host argument `{name}` to {other.arguments[name]!r} and {value!r}; turn one off."
                )

    def drop_dependents(self) -> None:
        is_applied = {name: each.status == "applied" for name, each in self.outcomes.items()}
        lost = [
            (outcome, relation.feature)
            for name, outcome in self.outcomes.items()
            for relation in outcome.feature.requires
            if is_applied[name]
            and not is_applied[relation.feature]
            and not (relation.unless is not None and relation.unless(self.context.of(name)))
        ]
        for outcome, required in lost:
            outcome.drop([f"requires feature `{required}`, which was skipped"])
        if lost:
            self.drop_dependents()
