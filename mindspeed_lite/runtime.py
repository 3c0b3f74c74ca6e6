"""From flags to swapped symbols: settings, plan, one change of all patches, the report; and back.

The rooms below know nothing of each other; this file introduces them: the features of `patches/`, the engine, the
device layer and the operators' fallbacks. There is one set of features in force. Each call adds a request to those
before it; what is in force is what all of them ask for together.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import platform as python_platform
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_lite import platform, report_output
from mindspeed_lite._version import __version__
from mindspeed_lite.engine import (
    ApplyError,
    Catalogue,
    Collision,
    Context,
    Option,
    OptionError,
    Outcome,
    Plan,
    PlanError,
    Report,
    Session,
    Settings,
    Swap,
    automatic_reasons,
    change,
    make_plan,
)
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.report_output import REPORT, rank, report_file

PATCHES = "mindspeed_lite.patches"

AUTO = Option(
    "--mindspeed-lite-auto",
    help="Turn on every feature that applies to this model, device and layout; the report says which and why not.",
)
STRICT = Option("--mindspeed-lite-strict", help="Turn every skipped feature and every fallback into an error.")
ALLOW_UNVERIFIED = Option(
    "--mindspeed-lite-allow-unverified",
    help="Apply a replacement although the code it replaces is not one of the verified releases'.",
)
VERIFY = Option(
    "--mindspeed-lite-verify",
    help="Run Megatron's original beside each replaced operator in its first N calls per shape and report the errors.",
    default=0,
    metavar="N",
)
GENERAL = (AUTO, STRICT, REPORT, ALLOW_UNVERIFIED, VERIFY)


@dataclass(frozen=True, eq=False)
class FeatureRequest:
    """What one call asks for.

    flags: values by dest, only those that the caller gave.
    host_args: where conditions find the model's arguments; None keeps those of earlier calls.
    explicit: arguments of the host that the user gave by flag.
    arguments: what was set in the host's arguments before it validated them, by feature.
    replaced: the values that stood there, by feature.
    notices: by text, the argument that each is about.
    """

    flags: Mapping[str, Any]
    host_args: Any = None
    explicit: Collection[str] = ()
    collisions: Sequence[Collision] = ()
    arguments: Mapping[str, Mapping[str, Any]] | None = None
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    notices: Mapping[str, str] = field(default_factory=dict)


class InForce:
    """The features in force: what was asked for, what came of it, and what it takes to take it back."""

    def __init__(self, requests: tuple[FeatureRequest, ...], session: Session) -> None:
        self.requests = requests
        self.session = session
        self.plan: Plan = Plan((), session.settings, "0")
        self.views: dict[str, Session] = {}
        self.swaps: dict[str, list[Swap]] = {}
        self.exits: list[Callable[[], object]] = []


_LOCK = threading.RLock()
_now: InForce | None = None


@functools.cache
def catalogue() -> Catalogue:
    """Every feature there is."""
    return Catalogue.load(PATCHES)


@functools.cache
def fingerprints() -> Table:
    """What the targets look like in the verified releases."""
    import mindspeed_lite.patches as patches

    return Table.load(Path(patches.__path__[0]) / "fingerprints.json")


def versions() -> dict[str, str]:
    """The versions a report names; Megatron's is that of the copy an import would find."""
    import torch

    from mindspeed_lite.platform import megatron

    found = {"mindspeed_lite": __version__, "torch": str(torch.__version__)}
    found[megatron.HOST] = megatron.version() or "not found"
    found["python"] = python_platform.python_version()
    return found


def current() -> InForce | None:
    """What is in force, or None."""
    return _now


def requests() -> tuple[FeatureRequest, ...]:
    """What has been asked for by the calls so far, in their order."""
    return () if _now is None else _now.requests


def plan_of(asked: Sequence[FeatureRequest], may_skip: bool = False) -> tuple[Plan, Context]:
    """What comes of these requests together, without applying any of it.

    Args:
        may_skip: strict mode is for a later plan.

    Raises:
        EngineError: a value no flag takes, a conflict, a target that does not exist, a host that is not there.
    """
    flags = {name: value for each in asked for name, value in each.flags.items()}
    settings = Settings.of((*GENERAL, *catalogue().options()), flags)
    if settings[VERIFY.dest] < 0:
        raise OptionError(f"{VERIFY.flag} takes a number of calls, 0 for none, not {settings[VERIFY.dest]}.")
    device = platform.activate()
    report_output.check_path(report_file(settings))
    found = versions()
    if found["megatron-core"] == "not found":
        raise PlanError(
            "megatron.core cannot be found: install it (pip install megatron-core) or put a Megatron-LM checkout "
            "first on PYTHONPATH."
        )
    last = next((each for each in reversed(asked) if each.host_args is not None), FeatureRequest({}))
    context = Context(settings, device.name, found, last.host_args, last.explicit, last.replaced)
    plan = make_plan(
        catalogue(),
        context,
        host_version=found["megatron-core"],
        fingerprints=fingerprints(),
        auto=bool(settings[AUTO.dest]),
        strict=bool(settings[STRICT.dest]) and not may_skip,
        allow_unverified=bool(settings[ALLOW_UNVERIFIED.dest]),
        collisions=[collision for each in asked for collision in each.collisions],
        without={name: why for each in asked for name, why in each.without.items()},
        sets_arguments=any(each.arguments is not None for each in asked),
    )
    return plan, replace(context, settings=plan.settings)


def put_in_force(asked: Sequence[FeatureRequest]) -> InForce:
    """Let exactly what these requests ask for be in force, together; if that fails nothing changes.

    A feature that was in force and still is, with the same flags, goes on with what it keeps.

    Raises:
        EngineError: as `plan_of`, or a patch cannot be applied.
    """
    with _LOCK:
        had_device = platform.current() is not None
        try:
            while True:
                try:
                    return _put_in_force(tuple(asked))
                except ApplyError as error:
                    named = Settings.of(catalogue().options(), {k: v for each in asked for k, v in each.flags.items()})
                    feature = error.feature
                    if feature not in catalogue() or catalogue()[feature].is_enabled(named):
                        raise
                    asked = [*asked, FeatureRequest({}, without={feature: str(error)})]
        except BaseException:
            if not had_device:
                platform.deactivate()
            raise


def _put_in_force(asked: tuple[FeatureRequest, ...]) -> InForce:
    global _now
    plan, context = plan_of(asked)
    report = Report(dict(context.versions), f"{context.device} ({platform.activate().describe()})")
    strict = bool(plan.settings[STRICT.dest])
    before = _now
    session = Session(plan.settings, context, report, strict=strict) if before is None else before.session
    after = InForce(asked, session)
    after.plan = plan
    undo = session.renew(plan.settings, context, report, strict)
    try:
        _renew_verifier(session)
        for outcome in plan.applied:
            name = outcome.feature.name
            if before is not None and _goes_on(outcome, before, plan.settings):
                after.views[name], after.swaps[name] = before.views[name], before.swaps[name]
            else:
                after.views[name] = session.of(name)
                after.swaps[name] = [Swap(name, step.patch, after.views[name]) for step in outcome.steps]
        old = set() if before is None else {id(swap) for each in before.swaps.values() for swap in each}
        kept = {id(swap) for each in after.swaps.values() for swap in each} & old
        add = [swap for each in after.swaps.values() for swap in each if id(swap) not in kept]
        remove = [] if before is None else [s for each in before.swaps.values() for s in each if id(s) not in kept]

        def tell() -> None:
            _complete_report(after)
            _listen(after)

        left = change(add=add, remove=remove, then=tell)
    except BaseException:
        for name, view in after.views.items():
            if before is None or before.views.get(name) is not view:
                view.end()
        undo()
        raise
    _now = after
    if before is not None:
        ended = [view for name, view in before.views.items() if after.views.get(name) is not view]
        left += _end(before, ended)
    for text in left:
        session.notice(text)
    return after


def _goes_on(outcome: Outcome, before: InForce, settings: Settings) -> bool:
    """Whether a feature was in force already with these flags."""
    feature = outcome.feature
    dests = [VERIFY.dest, *(option.dest for option in feature.options)]
    return (
        feature.name in before.swaps
        and [swap.patch for swap in before.swaps[feature.name]] == [step.patch for step in outcome.steps]
        and all(before.plan.settings.get(dest) == settings.get(dest) for dest in dests)
    )


def _renew_verifier(session: Session) -> None:
    """Let the session's patches compare their operators with the originals; rank 0 shows each result."""
    from mindspeed_lite.verify import Verifier

    calls = session.settings[VERIFY.dest]
    if (session.verifier.calls if session.verifier is not None else 0) == calls:
        return
    session.verifier = None
    if calls:
        session.verifier = Verifier(calls, session)
        if rank() == 0:
            session.verifier.listeners.append(lambda done: print(f"mindspeed_lite: {done.to_text()}", flush=True))


def _complete_report(after: InForce) -> None:
    """What is in force, as data: entries, backends, what was set, notices."""
    from mindspeed_lite.ops import dispatch

    session, report = after.session, after.session.report
    report.record(after.plan, [swap for each in after.swaps.values() for swap in each])
    wanted = {each.feature.name: dict(each.arguments) for each in after.plan.applied if each.arguments}
    given = next((each.arguments for each in reversed(after.requests) if each.arguments is not None), {})
    for entry in report.entries:
        if entry.status == "applied":
            operators = after.plan.outcome(entry.feature).feature.operators
            entry.backends = [f"{name}:{dispatch.selected(name, session.context.device).backend}" for name in operators]
        entry.arguments = dict(given.get(entry.feature, {})) if entry.status == "applied" else {}
        missing = {
            name: value
            for name, value in wanted.get(entry.feature, {}).items()
            if session.context.host_args is not None
            and name not in entry.arguments
            and session.context.arg(name, value) != value
        }
        if missing:
            listed = ", ".join(f"{name} = {value!r}" for name, value in missing.items())
            session.notice(
                f"{entry.feature} wants {listed}, which only a training script's parser sets: set it yourself"
            )
    changed = {name for each in given.values() for name in each}
    for request in after.requests:
        for notice, argument in request.notices.items():
            if argument not in changed:
                session.notice(notice)


def _listen(after: InForce) -> None:
    """Let the operators of the applied features say their fallbacks in the report."""
    from mindspeed_lite.ops import dispatch

    users: dict[str, list[str]] = {}
    for outcome in after.plan.applied:
        for operator in outcome.feature.operators:
            users.setdefault(operator, []).append(outcome.feature.name)

    def fallback(operator: str, backend: str, reasons: tuple[str, ...]) -> None:
        for feature in users.get(operator, ()):
            # The operator has logged it.
            after.session.fallback(feature, f"{operator} on {backend}: {'; '.join(reasons)}", is_logged=True)

    after.exits.append(dispatch.on_fallback(fallback))


def _end(ending: InForce, views: Sequence[Session]) -> list[str]:
    """Undo what these features keep and mark, once their patches have gone."""
    left = [text for view in reversed(views) for text in view.end()]
    while ending.exits:
        ending.exits.pop()()
    return left


def take_back() -> list[str]:
    """Take everything back; returns what was left alone or could not be undone, one line each.

    Raises:
        EngineError: a symbol could not be put back; everything is still in force.
    """
    global _now
    with _LOCK:
        if _now is None:
            return []
        ending = _now
        path = report_file(ending.session.settings)
        left = change(remove=[swap for each in ending.swaps.values() for swap in each])
        _now = None
        left += _end(ending, list(ending.views.values()))
        if path is not None and rank() == 0 and any(each.arguments is not None for each in ending.requests):
            atexit.unregister(_write_last_report)
            _rewrite_report(ending, path)
        return left


def applicable(found: InForce) -> dict[str, list[str]]:
    """Every feature with the reasons why it could not be turned on by its flag alone in this training; [] if it can."""
    return automatic_reasons(catalogue(), found.session.context)


def show_report(found: InForce) -> None:
    """On rank 0 print the report, and write it where the user wants it, again when the process ends."""
    if rank() != 0:
        return
    print(report_output.report_text(full_report(found), found.session.settings), end="", flush=True)
    path = report_file(found.session.settings)
    if path is not None:
        report_output.write(full_report(found), path)
        # Fallbacks appear while training runs.
        atexit.unregister(_write_last_report)
        atexit.register(_write_last_report)
        if found.session.verifier is not None:
            # A run that is killed later has shown this much.
            found.session.verifier.listeners.append(functools.partial(_rewrite_report, found, path))


def _write_last_report() -> None:
    path = None if _now is None else report_file(_now.session.settings)
    if _now is not None and path is not None:
        report_output.write(full_report(_now), path)


def _rewrite_report(found: InForce, path: str, cause: Any = None) -> None:
    # In the middle of training a full disk is no reason to stop; at the end the writing speaks for itself.
    with contextlib.suppress(OptionError):
        report_output.write(full_report(found), path)


def full_report(found: InForce) -> Report:
    """The report with what the device layer has changed in Megatron so far."""
    from mindspeed_lite.platform import megatron

    merged = Report.from_dict(found.session.report.as_dict())
    merged.entries = [*merged.entries, *megatron.entries()]
    return merged


def dest_of(keyword: str) -> str:
    """The dest that a keyword of the Python API means: a feature's name, another flag's dest, general ones in short.

    Raises:
        OptionError: no flag is called so; the text names the closest ones.
    """
    dests = {option.dest for option in catalogue().options()} | {option.dest for option in GENERAL}
    named = {each.name: option.dest for each in catalogue() for option in each.options if option.flag == each.flag}
    short = {option.dest.removeprefix("mindspeed_lite_"): option.dest for option in GENERAL}
    if keyword in dests:
        return keyword
    if keyword in named or keyword in short:
        return {**named, **short}[keyword]
    import difflib

    known = sorted({*named, *(dests - {*named.values(), *short.values()})})
    close = difflib.get_close_matches(keyword, [*known, *short], n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join([*known, *short])}."
    raise OptionError(f"mindspeed_lite has no option {keyword!r}{hint}")


def given_flags(args: Any) -> dict[str, Any]:
    """Our flags in the arguments of a script, a namespace or a mapping, those that are not at their default."""
    options = (*GENERAL, *catalogue().options())
    settings = Settings.of(options, args)
    return {each.dest: settings[each.dest] for each in options if settings[each.dest] != each.checked(None)}


def by_keyword(flags: Mapping[str, Any], host_args: Any) -> FeatureRequest:
    """The request of a call of the Python API, whose keywords `dest_of` explains."""
    return FeatureRequest({dest_of(keyword): value for keyword, value in flags.items()}, host_args)
