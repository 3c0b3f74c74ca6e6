"""Decides which features to apply, with the reasons of each that is not; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packaging.version import InvalidVersion, Version

from .errors import ConflictError, EngineError, PlanError, RequirementError, TargetError
from .feature import Context, Feature, Patch, Provide, Settings
from .options import Collision
from .source import has_attribute, mentions
from .swaps import provided
from .target import is_class, parse, resolve, vacancy

if TYPE_CHECKING:
    from .fingerprints import Table

T = TypeVar("T")
Status = Literal["applied", "skipped", "off"]
ALLOW_UNVERIFIED = "--mindspeed-lite-allow-unverified"


@dataclass(frozen=True, eq=False)
class PlannedPatch:
    """One patch that is to be applied, and how well its target is known."""

    feature: str
    patch: Patch
    verdict: str


@dataclass
class Outcome:
    """What becomes of one feature, and why. Reasons of one that is off are why auto left it off."""

    feature: Feature
    status: Status
    reasons: list[str] = field(default_factory=list)
    steps: list[PlannedPatch] = field(default_factory=list)
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One outcome per feature, by name, and the settings with what auto chose."""

    outcomes: tuple[Outcome, ...]
    settings: Settings
    host_version: str

    def outcome(self, feature: str) -> Outcome:
        return next(each for each in self.outcomes if each.feature.name == feature)

    @property
    def applied(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.status == "applied"]


def make_plan(
    features: Iterable[Feature],
    context: Context,
    *,
    host_version: str,
    fingerprints: Table,
    auto: bool = False,
    strict: bool = False,
    allow_unverified: bool = False,
    collisions: Sequence[Collision] = (),
    without: Mapping[str, str] | None = None,
    sets_arguments: bool = True,
) -> Plan:
    """Decide on every feature.

    Args:
        auto: turn on what applies by itself besides what the settings ask for. What only auto asked for never raises.
        strict: raise if a feature that the settings ask for does not apply.
        collisions: flags of features that mean something else to the host.
        without: features that do not apply for another reason, which is given.
        sets_arguments: whether the caller sets the arguments that features ask for. If not, a feature that is nothing
            else does not apply unless the host has them.

    Raises:
        EngineError: what the settings ask for contradicts itself or does not fit this host.
    """
    try:
        Version(host_version)
    except InvalidVersion as error:
        raise PlanError(f"host version `{host_version}` is not a version number.") from error
    everything = {feature.name: feature for feature in sorted(features, key=lambda each: each.name)}
    planner = _FeaturePlanner(context, host_version, fingerprints, allow_unverified, collisions, without or {})
    named = [each for each in everything.values() if each.is_enabled(context.settings)]
    names = {each.name for each in named}
    outcomes = {name: Outcome(feature, "off") for name, feature in everything.items()}
    if auto:
        _choose(planner, everything, outcomes, names)
    enabled = names | {name for name, each in outcomes.items() if each.status == "applied"}
    for feature in named:
        _refuse_contradictions(feature, everything, enabled, collisions)
    for feature in named:
        outcomes[feature.name] = planner.outcome(feature, refuse=True)
    _skip_dependents(outcomes, names)
    # Those asked for first, so that it is one that only auto chose which gives way.
    settled: list[Outcome] = []
    for each in sorted(outcomes.values(), key=lambda each: each.feature.name not in names):
        try:
            _settle(each, settled, planner.context)
            missing = [f"{name} = {value!r}" for name, value in each.arguments.items() if context.arg(name) != value]
            if missing and not each.steps and not sets_arguments:
                each.status, each.arguments = "skipped" if each.feature.name in names else "off", {}
                each.reasons.append(f"it only sets {', '.join(missing)}, which are left to you here: set them yourself")
                settled.remove(each)
        except EngineError as error:
            if each.feature.name in names:
                raise
            each.status, each.steps, each.reasons, each.arguments = "off", [], [str(error)], {}
    _skip_dependents(outcomes, names)
    skipped = [each for each in outcomes.values() if each.status == "skipped"]
    if strict and skipped:
        listed = "; ".join(f"feature {each.feature.label}: {', '.join(each.reasons)}" for each in skipped)
        raise PlanError(f"strict mode allows no skipped feature: {listed}.")
    return Plan(tuple(outcomes.values()), planner.context.settings, host_version)


def automatic_reasons(features: Iterable[Feature], context: Context) -> dict[str, list[str]]:
    """By feature, why its flag alone would not turn it on, its own requirements granted; [] if it would."""
    from .fingerprints import Table

    planner = _FeaturePlanner(context, "0", Table(), True, (), {})
    everything = {feature.name: feature for feature in features}
    found = {}
    for name, each in everything.items():
        granted = {other.feature: everything.get(other.feature, each) for other in each.requires}
        found[name] = planner.why_not_auto(each, granted)
    return found


def _choose(
    planner: _FeaturePlanner, everything: Mapping[str, Feature], outcomes: dict[str, Outcome], named: set[str]
) -> None:
    """Turn on what applies by itself, first what requires nothing; note why the rest stays off."""
    enabled = {name: everything[name] for name in sorted(named)}
    for feature in sorted(everything.values(), key=lambda each: len(each.requires)):
        if feature.name in named:
            continue
        outcome = outcomes[feature.name]
        outcome.reasons = planner.why_not_auto(feature, enabled)
        if outcome.reasons:
            continue
        try:
            found = planner.outcome(feature, refuse=False)
        except EngineError as error:
            outcome.reasons = [str(error)]
            continue
        outcome.reasons = found.reasons
        if found.status == "applied":
            outcome.status, outcome.steps = found.status, found.steps
            enabled[feature.name] = feature
            planner.turn_on(feature)


def _refuse_contradictions(
    feature: Feature, everything: Mapping[str, Feature], enabled: set[str], collisions: Sequence[Collision]
) -> None:
    for collision in collisions:
        if collision.feature == feature.name:
            raise PlanError(
                f"feature {feature.label}: {collision.flag} means something else in this host; "
                "leave the feature off, or use a release of this package that knows this host version."
            )
    for relation in feature.conflicts:
        if relation.feature in enabled:
            other = everything[relation.feature]
            raise ConflictError(
                f"features {feature.label} and {other.label} conflict: {relation.reason}; turn one off."
            )
    for relation in feature.requires:
        if relation.feature not in enabled:
            raise RequirementError(
                f"feature {feature.label} requires feature `{relation.feature}`, which is off: "
                f"{relation.reason}; turn it on too."
            )


def _skip_dependents(outcomes: Mapping[str, Outcome], named: set[str]) -> None:
    changed = True
    while changed:
        changed = False
        for outcome in outcomes.values():
            for relation in outcome.feature.requires if outcome.status == "applied" else ():
                if outcomes[relation.feature].status != "applied":
                    outcome.status = "skipped" if outcome.feature.name in named else "off"
                    outcome.steps, outcome.arguments, changed = [], {}, True
                    outcome.reasons.append(f"requires feature `{relation.feature}`, which was skipped")


def _settle(outcome: Outcome, settled: list[Outcome], context: Context) -> None:
    """Ask a feature that applies for its arguments, and refuse what contradicts one that is settled."""
    if outcome.status != "applied":
        return
    feature = outcome.feature
    if feature.arguments is not None:
        outcome.arguments = dict(_ask(feature, "arguments", feature.arguments, context.of(feature.name)))
    provided = {step.patch.target for step in outcome.steps if isinstance(step.patch, Provide)}
    for other in settled:
        both = f"features {other.feature.label} and {feature.label}"
        for step in other.steps:
            if isinstance(step.patch, Provide) and step.patch.target in provided:
                raise ConflictError(f"{both} both provide `{step.patch.target}`; turn one off.")
        for name, value in outcome.arguments.items():
            if other.arguments.get(name, value) != value:
                raise ConflictError(
                    f"{both} set host argument `{name}` to {other.arguments[name]!r} and {value!r}; turn one off."
                )
    settled.append(outcome)


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
class _FeaturePlanner:
    """Judges one feature at a time against the host as it is."""

    context: Context
    host_version: str
    fingerprints: Table
    allow_unverified: bool
    collisions: Sequence[Collision]
    without: Mapping[str, str]

    def turn_on(self, feature: Feature) -> None:
        values = {**self.context.settings, feature.options[0].dest: True}
        self.context = replace(self.context, settings=Settings(values))

    def why_not_auto(self, feature: Feature, enabled: Mapping[str, Feature]) -> list[str]:
        """Reasons why auto leaves a feature off that could be known without looking at the host's code."""
        reasons = [self.without[feature.name]] if feature.name in self.without else []
        if feature.not_auto:
            reasons.append(feature.not_auto)
        elif not feature.options or not feature.options[0].is_switch:
            reasons.append("it needs a value that only the user can choose")
        reasons += [
            f"{each.flag} means something else in this host" for each in self.collisions if each.feature == feature.name
        ]
        clashes = [(each.feature, each.reason) for each in feature.conflicts if each.feature in enabled]
        clashes += [
            (name, each.reason)
            for name, other in enabled.items()
            for each in other.conflicts
            if each.feature == feature.name
        ]
        reasons += [f"conflicts with {name}: {reason}" for name, reason in dict.fromkeys(clashes)]
        reasons += [
            f"requires {relation.feature}: {relation.reason}"
            for relation in feature.requires
            if relation.feature not in enabled
        ]
        try:
            return reasons + self.conditions(feature)
        except EngineError as error:
            return [*reasons, str(error)]

    def conditions(self, feature: Feature) -> list[str]:
        """Reasons of the feature's own why it does not apply."""
        context = self.context.of(feature.name)
        reasons = feature.conflict_reasons(lambda name: context.arg(name, None))
        if feature.condition is not None:
            answer = _ask(feature, "condition", feature.condition, context)
            # A single text is a sequence of texts too: its letters.
            reasons += filter(None, [answer] if isinstance(answer, str) else answer)
        return reasons

    def outcome(self, feature: Feature, refuse: bool) -> Outcome:
        """Whether the feature applies; with `refuse` a target that does not exist is an error."""
        reasons = self.conditions(feature)
        given = self.without.get(feature.name)
        # The condition may have said so again.
        reasons += [given] if given is not None and given not in reasons else []
        doubts: list[str] = []
        unresolved: list[TargetError] = []
        steps: list[PlannedPatch] = []
        patches, unfit = feature.patches_for(self.host_version)
        reasons += unfit
        for patch in patches:
            try:
                steps.append(self._step(feature, patch, doubts))
            except TargetError as error:
                unresolved.append(error)
        if doubts:
            doubts[-1] += (
                f" (`mindspeed-lite features {feature.name} --diff` shows what differs in host version "
                f"{self.host_version}, {ALLOW_UNVERIFIED} applies the feature all the same)"
            )
            reasons += doubts
        if unresolved and refuse and not reasons:
            raise TargetError(
                f"feature {feature.label} does not fit host version {self.host_version}: "
                f"{unresolved[0]} Turn it off, or use a release of this package that knows this version."
            ) from unresolved[0]
        reasons += [str(error) for error in unresolved]
        return Outcome(feature, "skipped" if reasons else "applied", reasons, [] if reasons else steps)

    def _step(self, feature: Feature, patch: Patch, doubts: list[str]) -> PlannedPatch:
        relied_on = list(self.fingerprints.doubts(patch))
        for problem in relied_on:
            self._doubt(problem, patch, doubts)
        if isinstance(patch, Provide):
            module = patch.wanted_by or parse(patch.target)[0]
            name = (parse(patch.target)[1] or (patch.target,))[-1]
            vacant = (provided(patch.target) or vacancy(patch.target)) is not None
            verdict = "provided" if vacant else "already provided by the host"
            if vacant and not mentions(module, name):
                self._doubt(f"`{patch.target}`: nothing in `{module}` looks for it", patch, doubts)
            return PlannedPatch(feature.name, patch, verdict)
        target = resolve(patch.target)
        verdict, objection = self.fingerprints.judge(patch, target.raw)
        if objection:
            self._doubt(f"`{patch.target}` {objection}", patch, doubts)
        elif relied_on:
            verdict = relied_on[0]
        for text in patch.reads:
            missing = self._missing(text, patch.target, target.owner)
            if missing:
                self._doubt(f"`{patch.target}`: {missing}", patch, doubts)
        return PlannedPatch(feature.name, patch, verdict if verdict == "verified" else f"unverified: {verdict}")

    def _doubt(self, problem: str, patch: Patch, doubts: list[str]) -> None:
        if not self.allow_unverified:
            doubts.append(f"{problem} ({patch.kind})")

    def _missing(self, text: str, target: str, owner: Any) -> str:
        """Which attribute that a patch reads is gone, as a clause."""
        module, colon, path = text.rpartition(":")
        holder, _, name = path.rpartition(".")
        if colon or holder or not is_class(owner):
            try:
                owner = resolve(f"{module if colon else parse(target)[0]}:{holder or name}").raw
            except TargetError as error:
                return str(error)
            if not holder:
                return ""
        if is_class(owner) and not has_attribute(owner, name):
            return f"`{owner.__module__}.{owner.__qualname__}` has no attribute `{name}`, which the patch reads"
        return ""
