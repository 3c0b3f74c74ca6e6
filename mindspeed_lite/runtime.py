"""Activates features from settings: plan, patch changes, report, undo.

All requests together define one set of active features.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import difflib
import functools
import os
import platform as python_platform
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_lite import platform
from mindspeed_lite._version import __version__
from mindspeed_lite.engine import (
    ApplyError,
    Catalogue,
    Context,
    FeatureOutcome,
    Option,
    OptionError,
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
from mindspeed_lite.text_layout import columns

PATCHES = "mindspeed_lite.patches"

AUTO = Option(
    "--mindspeed-lite-auto",
    help="Turn on every feature that applies to this model, device and layout; the report says which and why not.",
)
VERBOSE = "verbose"
REPORT = Option(
    "--mindspeed-lite-report",
    help="Write what was swapped and why the rest was not to FILE: as text where its name ends in .txt, else as JSON. "
    f"The word {VERBOSE} prints it in place of the summary (rank 0).",
    default=None,
    metavar=f"FILE|{VERBOSE}",
)
STRICT = Option("--mindspeed-lite-strict", help="Turn every skipped feature and every fallback into an error.")
ALLOW_UNVERIFIED = Option(
    "--mindspeed-lite-allow-unverified",
    help="Apply a replacement although the code it replaces is not one of the verified releases'.",
)
VERIFY = Option(
    "--mindspeed-lite-verify",
    help="Compare replaced operators with Megatron's originals in their first N calls per shape and report the errors.",
    default=0,
    least=0,
    metavar="N",
)
HOST_REPORT = Option(
    "--mindspeed-lite-host-report",
    help="Print the synchronisations and launches of step 3, and the host's time in step 4, by place and module.",
)
GENERAL = (AUTO, STRICT, REPORT, ALLOW_UNVERIFIED, VERIFY, HOST_REPORT)


@dataclass(frozen=True, eq=False)
class FeatureRequest:
    """Features requested by one call.

    Attributes:
        flags: given values by dest.
        host_args: for conditions; None keeps earlier ones.
        explicit: host arguments given by flag.
        arguments: by feature, host arguments it set before validation; None without a parser.
        replaced: their previous values.
        without: excluded features with reasons.
        notices: text -> its argument.
    """

    flags: Mapping[str, Any]
    host_args: Any = None
    explicit: Collection[str] = ()
    arguments: Mapping[str, Mapping[str, Any]] | None = None
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    notices: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class ActiveFeatures:
    """Requests and what they led to; `swaps`: by feature, each list with the feature's own view of the session."""

    requests: tuple[FeatureRequest, ...]
    session: Session
    plan: Plan
    swaps: dict[str, list[Swap]]


_LOCK = threading.RLock()
_active: ActiveFeatures | None = None
_stop_listening: Callable[[], None] | None = None
_host_report: Any = None


@functools.cache
def catalogue() -> Catalogue:
    return Catalogue.load(PATCHES)


@functools.cache
def fingerprints() -> Table:
    import mindspeed_lite.patches as patches

    return Table.load(Path(patches.__path__[0]) / "fingerprints.json")


def versions() -> dict[str, str]:
    import torch

    from mindspeed_lite.platform import megatron

    return {
        "mindspeed_lite": __version__,
        "torch": str(torch.__version__),
        megatron.HOST: megatron.version() or "not found",
        "python": python_platform.python_version(),
    }


def current() -> ActiveFeatures | None:
    return _active


def requests() -> tuple[FeatureRequest, ...]:
    return () if _active is None else _active.requests


# Settings and plan


@functools.cache
def _keywords() -> dict[str, str]:
    """Dest of each keyword of the Python API: a dest, a feature, or a short general flag."""
    options = (*GENERAL, *catalogue().options())
    features = {each.name: option.dest for each in catalogue() for option in each.options if option.flag == each.flag}
    short = {option.dest.removeprefix("mindspeed_lite_"): option.dest for option in GENERAL}
    return {option.dest: option.dest for option in options} | features | short


def _dests(keywords: Iterable[str]) -> dict[str, str]:
    """Dest of each keyword; raises one OptionError for all that are unknown."""
    found = {each: _keywords().get(each, "") for each in keywords}
    known = list({dest: name for name, dest in _keywords().items()}.values())
    problems = []
    for keyword in [each for each, dest in found.items() if not dest]:
        close = difflib.get_close_matches(keyword, known, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(known)}."
        problems.append(f"mindspeed_lite has no option {keyword!r}{hint}")
    if problems:
        raise OptionError(" ".join(problems))
    return found


def by_keyword(flags: Mapping[str, Any], host_args: Any) -> FeatureRequest:
    from mindspeed_lite.platform import megatron

    dests = _dests(flags)
    values = {dests[keyword]: value for keyword, value in flags.items()}
    return FeatureRequest(values, megatron.arguments_of(host_args))


def given_flags(args: Any) -> dict[str, Any]:
    options = (*GENERAL, *catalogue().options())
    settings = Settings.of(options, args)
    return {each.dest: settings[each.dest] for each in options if settings[each.dest] != each.checked(None)}


def settings_of(asked: Sequence[FeatureRequest]) -> Settings:
    values = {name: value for each in asked for name, value in each.flags.items()}
    return Settings.of((*GENERAL, *catalogue().options()), values)


def plan_requests(asked: Sequence[FeatureRequest], only_conditions: bool = False) -> tuple[Plan, Context]:
    """Plan of all requests and its context; applies nothing. Raises EngineError.

    only_conditions: ignore targets and strict mode.
    """
    settings = settings_of(asked)
    device = platform.activate()
    _check_report_path(settings)
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
        fingerprints=None if only_conditions else fingerprints(),
        auto=bool(settings[AUTO.dest]),
        strict=bool(settings[STRICT.dest]) and not only_conditions,
        allow_unverified=bool(settings[ALLOW_UNVERIFIED.dest]),
        without={name: why for each in asked for name, why in each.without.items()},
        sets_arguments=any(each.arguments is not None for each in asked),
    )
    return plan, replace(context, settings=plan.settings)


def with_arguments(request: FeatureRequest, earlier: Sequence[FeatureRequest]) -> FeatureRequest:
    """Request with its features' host arguments, set before validation in a mapping.

    Conditions may depend on arguments of other features, so judging repeats until nothing changes.
    """
    settings = settings_of([*earlier, request])
    setting = [each for each in catalogue() if each.arguments is not None]
    if not settings[AUTO.dest] and not any(each.is_enabled(settings) for each in setting):
        return request
    before: Mapping[str, Any] = request.host_args
    seen = []
    while request.arguments not in seen:
        seen.append(request.arguments)
        plan, _ = plan_requests([*earlier, request], only_conditions=True)
        arguments = {each.feature.name: each.arguments for each in plan.applied if each.arguments}
        values = {name: value for each in arguments.values() for name, value in each.items()}
        replaced = {name: {key: before[key] for key in own if key in before} for name, own in arguments.items()}
        request = replace(request, host_args={**before, **values}, arguments=arguments, replaced=replaced)
    return request


def applicable(active: ActiveFeatures) -> dict[str, list[str]]:
    return automatic_reasons(catalogue(), active.session.context)


# Swaps


def apply_requests(asked: Sequence[FeatureRequest], planned: tuple[Plan, Context] | None = None) -> ActiveFeatures:
    """Activate exactly the requested features; on failure nothing changes.

    Features with unchanged flags keep their state.

    Args:
        planned: the plan of these requests, if already made.

    Raises:
        EngineError: a feature cannot be applied.
    """
    with _LOCK:
        had_device = platform.current() is not None
        try:
            while True:
                try:
                    return _apply(tuple(asked), *(planned or plan_requests(asked)))
                except ApplyError as error:
                    feature = error.feature
                    if feature not in catalogue() or catalogue()[feature].is_enabled(settings_of(asked)):
                        raise
                    asked, planned = [*asked, FeatureRequest({}, without={feature: str(error)})], None
        except BaseException:
            if not had_device:
                platform.deactivate()
            raise


def _apply(asked: tuple[FeatureRequest, ...], plan: Plan, context: Context) -> ActiveFeatures:
    from mindspeed_lite.ops import dispatch

    global _active, _stop_listening
    report = Report(dict(context.versions), f"{context.device} ({platform.activate().describe()})")
    strict = bool(plan.settings[STRICT.dest])
    before = _active
    old = {} if before is None else before.swaps
    session = Session(plan.settings, context, report, strict=strict) if before is None else before.session
    new: dict[str, list[Swap]] = {}
    for outcome in plan.applied:
        name = outcome.feature.name
        if before is not None and _is_unchanged(outcome, before, plan.settings):
            new[name] = old[name]
        else:
            view = session.of(name) if outcome.steps else session
            new[name] = [Swap(name, step.patch, view) for step in outcome.steps]
    after = ActiveFeatures(asked, session, plan, new)
    begin = [swap for name in new for swap in new[name] if new[name] is not old.get(name)]
    end = [swap for name in old for swap in old[name] if old[name] is not new.get(name)]
    undo = session.renew(plan.settings, context, report, strict)
    try:
        _renew_verifier(session)
        left = change(add=begin, remove=end, then=lambda: _complete_report(after))
    except BaseException:
        _end(begin)
        undo()
        raise
    _active = after
    if _stop_listening is None:
        _stop_listening = dispatch.on_fallback(_operator_fallback)
    _renew_host_report(session)
    for text in left + _end(end) + _begin(begin):
        session.notice(text)
    return after


def _is_unchanged(outcome: FeatureOutcome, before: ActiveFeatures, settings: Settings) -> bool:
    feature = outcome.feature
    dests = [VERIFY.dest, *(option.dest for option in feature.options)]
    return (
        feature.name in before.swaps
        and [swap.patch for swap in before.swaps[feature.name]] == [step.patch for step in outcome.steps]
        and all(before.plan.settings.get(dest) == settings.get(dest) for dest in dests)
    )


def _begin(swaps: Sequence[Swap]) -> list[str]:
    """Begin features, those that others require first."""
    views = dict.fromkeys(swap.session for swap in swaps)
    ordered = sorted(views, key=lambda view: len(catalogue()[view.feature].requires))
    return [text for view in ordered for text in view.begin()]


def _end(swaps: Sequence[Swap]) -> list[str]:
    return [text for view in dict.fromkeys(swap.session for swap in reversed(swaps)) for text in view.end()]


def disable_all() -> list[str]:
    """Undo everything; return what was left alone or failed, one line each.

    Raises EngineError if a symbol could not be restored; everything is still active.
    """
    global _active, _host_report, _stop_listening
    with _LOCK:
        if _active is None:
            return []
        ending, swaps = _active, [swap for each in _active.swaps.values() for swap in each]
        left = change(remove=swaps)
        _active = None
        if _stop_listening is not None:
            _stop_listening()
            _stop_listening = None
        if _host_report is not None:
            _host_report.end()
            _host_report = None
        left += _end(swaps)
        atexit.unregister(_rewrite_report)
        if any(each.arguments is not None for each in ending.requests):
            _rewrite_report(ending)
        return left


# Report


def _renew_verifier(session: Session) -> None:
    from mindspeed_lite.verify import Verifier

    calls = session.settings[VERIFY.dest]
    if (session.verifier.calls if session.verifier is not None else 0) == calls:
        return
    session.update(verifier=Verifier(calls, session) if calls else None)
    if calls and _is_first_rank():
        session.verifier.listeners.append(lambda done: print(f"mindspeed_lite: {done.to_text()}", flush=True))


def _renew_host_report(session: Session) -> None:
    global _host_report
    if bool(session.settings[HOST_REPORT.dest]) == (_host_report is not None):
        return
    if _host_report is not None:
        _host_report.end()
        _host_report = None
    else:
        from mindspeed_lite.host_report import HostReport

        _host_report = HostReport(session.context.device == "cpu", _is_first_rank())


def _complete_report(after: ActiveFeatures) -> None:
    from mindspeed_lite.ops import dispatch

    session, context = after.session, after.session.context
    session.report.record(after.plan)
    given = next((each.arguments for each in reversed(after.requests) if each.arguments is not None), {})
    for entry, outcome in zip(session.report.entries, after.plan.outcomes, strict=True):
        entry.arguments = {}
        if outcome.status != "applied":
            continue
        operators = outcome.feature.operators
        entry.backends = [f"{name}:{dispatch.selected(name, context.device).backend}" for name in operators]
        entry.arguments = dict(given.get(entry.feature, {}))
        missing = [
            f"{name} = {value!r}"
            for name, value in outcome.arguments.items()
            if context.host_args is not None and name not in entry.arguments and context.arg(name, value) != value
        ]
        if missing:
            session.notice(
                f"{entry.feature}: in Python, without a training script's parser, set {', '.join(missing)} in the "
                "model's configuration before the model is built"
            )
    changed = {name for each in given.values() for name in each}
    for notices in (each.notices for each in after.requests):
        for text in (text for text, argument in notices.items() if argument not in changed):
            session.notice(text)


def _operator_fallback(operator: str, backend: str, reasons: tuple[str, ...]) -> None:
    for outcome in () if _active is None else _active.plan.applied:
        if _active is not None and operator in outcome.feature.operators:
            text = f"{operator} on {backend}: {'; '.join(reasons)}"
            _active.session.fallback(outcome.feature.name, text, is_logged=True)


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _report_path(settings: Settings) -> Path | None:
    given = settings[REPORT.dest]
    return None if given in (None, VERBOSE) or not _is_first_rank() else Path(given)


def _check_report_path(settings: Settings) -> None:
    """Check before any change that the report can be written."""
    path = _report_path(settings)
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise OptionError(f"{REPORT.flag} {path}: cannot be written there; give a file in a folder that exists.")


def show_report(active: ActiveFeatures) -> None:
    """Print the report on rank 0 and write the user's file, again at exit."""
    if not _is_first_rank():
        return
    settings, report = active.session.settings, full_report(active)
    verbose = settings[REPORT.dest] == VERBOSE
    details = "" if verbose else settings[REPORT.dest] or f"{REPORT.flag} {VERBOSE}"
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text, rule = report.to_text(columns(sys.stdout, 80), color, verbose, details), "-" * 40
    print(f"{rule} mindspeed_lite\n{text}{rule}", flush=True)
    path = _report_path(settings)
    if path is not None:
        try:
            report.write(path)
        except OSError as error:
            raise OptionError(f"{REPORT.flag} {path}: cannot be written ({error}).") from error
        atexit.unregister(_rewrite_report)
        atexit.register(_rewrite_report)
        if active.session.verifier is not None:
            active.session.verifier.listeners.append(lambda done: _rewrite_report())  # a run may be killed


def _rewrite_report(ended: ActiveFeatures | None = None) -> None:
    active = ended or _active
    path = None if active is None else _report_path(active.session.settings)
    if active is not None and path is not None:
        with contextlib.suppress(OSError):  # a full disk does not stop training
            full_report(active).write(path)


def full_report(active: ActiveFeatures) -> Report:
    from mindspeed_lite.platform import megatron

    report = copy.deepcopy(active.session.report)
    report.entries += megatron.entries()
    return report
