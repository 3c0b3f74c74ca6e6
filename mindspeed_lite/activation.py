"""From flags to swapped symbols: settings, plan, one transaction, the report; and back.

The rooms below know nothing of each other; this file introduces them: the features of `patches/`, the engine, the
device layer and the operators' fallbacks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform as python_platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_lite import platform
from mindspeed_lite._version import __version__
from mindspeed_lite.engine import (
    Catalogue,
    Collision,
    Context,
    EngineError,
    Feature,
    Option,
    OptionError,
    Plan,
    PlanError,
    Report,
    Session,
    Settings,
    Table,
    Transaction,
    make_plan,
)

PATCHES = "mindspeed_lite.patches"

AUTO = Option(
    "--mindspeed-lite-auto",
    help="Turn on every feature that applies to this model, device and layout; the report says which and why not.",
)
STRICT = Option("--mindspeed-lite-strict", help="Turn every skipped feature and every fallback into an error.")
REPORT = Option(
    "--mindspeed-lite-report", help="Write what was swapped, as JSON, to FILE (rank 0).", default=None, metavar="FILE"
)
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


class Active:
    """One set of features in force, with what it takes to take them back."""

    def __init__(self, session: Session, plan: Plan, transaction: Transaction) -> None:
        self.session = session
        self.plan = plan
        self.transaction = transaction
        self._unsubscribe: list[Callable[[], None]] = []

    def listen(self) -> None:
        """Let the operators of the applied features say their fallbacks in this session's report."""
        from mindspeed_lite.ops import dispatch

        users: dict[str, list[str]] = {}
        for outcome in self.plan.outcomes:
            if outcome.status == "applied":
                for operator in outcome.feature.operators:
                    users.setdefault(operator, []).append(outcome.feature.name)

        def fallback(operator: str, backend: str, reasons: tuple[str, ...]) -> None:
            for feature in users.get(operator, ()):
                self.session.fallback(
                    feature, f"{operator} runs on the reference, not on {backend}: {'; '.join(reasons)}"
                )

        self._unsubscribe.append(dispatch.on_fallback(fallback))

    def end(self) -> list[str]:
        """Take the features back; returns what could not be, as the transaction names it."""
        while self.session.at_end:
            self.session.at_end.pop()()
        left = self.transaction.undo()
        while self._unsubscribe:
            self._unsubscribe.pop()()
        return left


_stack: list[Active] = []
_training: Active | None = None


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


def activate(
    given: Mapping[str, Any] | Any,
    *,
    host_args: Any = None,
    collisions: Sequence[Collision] = (),
    notices: Mapping[str, str] | None = None,
    explicit: Collection[str] = (),
) -> Active:
    """Choose features from `given` (a namespace or mapping of dests) and swap them in, all or none.

    `notices` are texts for the report, each with the host argument it is about: a text about an argument that a
    feature sets is not true any more, and is left out.

    Raises:
        EngineError: a value no flag takes, a conflict, a target that does not exist, a host that is not there;
            nothing has been changed.
    """
    settings = Settings.of((*GENERAL, *catalogue().options()), given)
    _check_report_path(settings[REPORT.dest])
    if settings[VERIFY.dest] < 0:
        raise OptionError(f"{VERIFY.flag} takes a number of calls, 0 for none, not {settings[VERIFY.dest]}.")
    had_device = platform.current() is not None
    try:
        return _activate(settings, host_args, collisions, notices or {}, explicit)
    except BaseException:
        if not had_device:
            platform.deactivate()
        raise


def _check_report_path(path: str | None) -> None:
    """Before anything moves: whether the report can be written where the user wants it."""
    if path is None or _rank() != 0:
        return
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise OptionError(f"{REPORT.flag} {path}: cannot be written there; give a file in a folder that exists.")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _activate(
    settings: Settings,
    host_args: Any,
    collisions: Sequence[Collision],
    notices: Mapping[str, str],
    explicit: Collection[str],
) -> Active:
    from mindspeed_lite.platform import megatron

    device = platform.activate()
    found = versions()
    if found["megatron-core"] == "not found":
        raise PlanError(
            "megatron.core cannot be found: install it (pip install megatron-core) or put a Megatron-LM checkout "
            "first on PYTHONPATH."
        )
    context = Context(settings, device.name, found, host_args, explicit)
    left_off: dict[str, list[str]] = {}
    if settings[AUTO.dest]:
        settings, left_off = _choose_all(context)
        context = Context(settings, device.name, found, host_args, explicit)
    strict = bool(settings[STRICT.dest])
    report = Report(found, f"{device.name} ({device.describe()})")
    session = Session(settings, context, report, strict=strict)
    if settings[VERIFY.dest]:
        _verify(session)
    plan = make_plan(
        catalogue(),
        context,
        host_version=found["megatron-core"],
        fingerprints=fingerprints(),
        session=session,
        allow_unverified=bool(settings[ALLOW_UNVERIFIED.dest]),
        strict=strict,
        skip_modules=megatron.LIBRARIES,
        collisions=collisions,
    )
    transaction = Transaction(plan, session)
    transaction.apply()
    session.transaction = transaction
    report.record(plan, settings, transaction)
    _describe_backends(report, plan, device.name)
    for notice, argument in notices.items():
        if argument not in plan.adjustments:
            session.notice(notice)
    for name, reasons in left_off.items():
        session.notice(f"auto leaves {name} off: {'; '.join(reasons)}")
    active = Active(session, plan, transaction)
    active.listen()
    _stack.append(active)
    return active


def _verify(session: Session) -> None:
    """Let the session's patches compare their operators with the originals; rank 0 shows each result."""
    from mindspeed_lite.verify import Verifier

    session.verifier = Verifier(session.settings[VERIFY.dest], session)
    if _rank() == 0:
        session.verifier.listeners.append(lambda done: print(f"mindspeed_lite: {done.to_text()}", flush=True))


def activate_by_keyword(flags: Mapping[str, Any], host_args: Any) -> Active:
    """`activate` for the Python API, whose keywords `dest_of` explains."""
    return activate({dest_of(keyword): value for keyword, value in flags.items()}, host_args=host_args)


def _choose_all(context: Context) -> tuple[Settings, dict[str, list[str]]]:
    """Settings with every switch on whose feature applies, and the reasons of those left off."""
    values = dict(context.settings)
    left_off: dict[str, list[str]] = {}
    features = catalogue()
    enabled = {feature.name for feature in features if feature.is_enabled(context.settings)}
    # What requires others comes after them; nothing that is required requires something itself.
    for feature in sorted(features, key=lambda each: len(each.requires)):
        if feature.name in enabled:
            continue
        reasons = _why_not_automatic(feature, context, enabled)
        if reasons:
            left_off[feature.name] = reasons
        else:
            values[feature.options[0].dest] = True
            enabled.add(feature.name)
    return Settings(values), left_off


def _why_not_automatic(feature: Feature, context: Context, enabled: set[str]) -> list[str]:
    reasons = []
    if not feature.options or not feature.options[0].is_switch:
        reasons.append("it needs a value that only the user can choose")
    if feature.condition is not None:
        reasons += list(feature.condition(context))
    reasons += [
        f"conflicts with {relation.feature}: {relation.reason}"
        for relation in feature.conflicts
        if relation.feature in enabled
    ]
    reasons += [
        f"requires {relation.feature}: {relation.reason}"
        for relation in feature.requires
        if relation.feature not in enabled
    ]
    return reasons


def applicable(active: Active) -> dict[str, list[str]]:
    """Every feature with the reasons why it could not be turned on by its flag alone in this training; [] if it can."""
    context = active.session.context
    return {
        feature.name: _why_not_automatic(feature, context, {relation.feature for relation in feature.requires})
        for feature in catalogue()
    }


def _describe_backends(report: Report, plan: Plan, device: str) -> None:
    from mindspeed_lite.ops import dispatch

    for entry in report.entries:
        if entry.status == "applied":
            operators = plan.outcome(entry.feature).feature.operators
            entry.backends = [f"{name}:{dispatch.selected(name, device).backend}" for name in operators]


def activate_for_training(
    args: Any, notices: Mapping[str, str], collisions: Sequence[Collision], explicit: Collection[str] = ()
) -> None:
    """Activate from Megatron's validated arguments; a second call in one process replaces the first.

    Sets the arguments that the applied features ask for, prints the report on rank 0 and writes the report file.
    """
    from mindspeed_lite.platform import megatron

    global _training
    earlier = _training if _training in _stack else None
    if earlier is not None:
        deactivate(earlier)
    try:
        active = activate(args, host_args=args, collisions=collisions, notices=notices, explicit=explicit)
    except BaseException:
        if earlier is not None:
            earlier.transaction.apply()
            earlier.listen()
            _stack.append(earlier)
        raise
    for name, value in active.plan.adjustments.items():
        for holder in megatron.argument_holders(args):
            if holder is args or hasattr(holder, name):
                setattr(holder, name, value)
    _training = active
    if _rank() != 0:
        return
    print(report_text(active), end="", flush=True)
    path = active.session.settings[REPORT.dest]
    if path is not None:
        _write_report(active, path)
        # Fallbacks appear while training runs.
        atexit.register(_write_report, active, path)
        if active.session.verifier is not None:
            # A run that is killed later has shown this much.
            active.session.verifier.listeners.append(functools.partial(_rewrite_report, active, path))


def _write_report(active: Active, path: str) -> None:
    try:
        Path(path).write_text(full_report(active).to_json() + "\n")
    except OSError as error:
        raise OptionError(f"{REPORT.flag} {path}: cannot be written ({error}).") from error


def _rewrite_report(active: Active, path: str, cause: Any) -> None:
    # In the middle of training a full disk is no reason to stop; at the end the writing speaks for itself.
    with contextlib.suppress(OptionError):
        _write_report(active, path)


def full_report(active: Active) -> Report:
    """The session's report with what the device layer has changed in Megatron so far."""
    from mindspeed_lite.platform import megatron

    data = active.session.report.as_dict()
    merged = Report.from_dict(data)
    merged.entries = [*merged.entries, *megatron.entries()]
    return merged


def report_text(active: Active) -> str:
    """The report for a terminal: framed, in colour where the output is one."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    rule = "-" * 40
    return f"{rule} mindspeed_lite\n{full_report(active).to_text(color=color)}{rule}\n"


def deactivate(active: Active | None = None) -> list[str]:
    """Take back `active`, or everything in force, the latest first."""
    left: list[str] = []
    while _stack if active is None else active in _stack:
        last = _stack[-1] if active is None else active
        left += last.end()
        _stack.remove(last)
    return left


def current() -> Active | None:
    """The latest set of features in force."""
    return _stack[-1] if _stack else None


def dest_of(keyword: str) -> str:
    """The dest that a keyword of the Python API means; general flags go without their prefix.

    Raises:
        OptionError: no flag is called so; the text names the closest ones.
    """
    general = {option.dest.removeprefix("mindspeed_lite_"): option.dest for option in GENERAL}
    known = {option.dest for option in catalogue().options()} | set(general.values())
    if keyword in known:
        return keyword
    if keyword in general:
        return general[keyword]
    import difflib

    close = difflib.get_close_matches(keyword, [*sorted(known), *general], n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else f"; there are {', '.join(sorted(known))}."
    raise OptionError(f"mindspeed_lite has no option {keyword!r}{hint}")


__all__ = [
    "GENERAL",
    "Active",
    "EngineError",
    "activate",
    "activate_by_keyword",
    "activate_for_training",
    "catalogue",
    "current",
    "deactivate",
    "dest_of",
    "fingerprints",
    "full_report",
    "report_text",
    "versions",
]
