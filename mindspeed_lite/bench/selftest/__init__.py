"""`doctor --selftest`: checks the device, and every operator against float64.

Checks run in a process of their own; after a crash or hang a new one continues. Figures of a check: relative `error`
and `bound` of output and gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from mindspeed_lite.bench import isolated

SCHEMA_VERSION = 3
KIND = "selftest"
SECONDS = 120.0

OK, FALLBACK, FAILED = "ok", "fallback", "failed"

Progress = Callable[[int, int, str], None]
Line = dict[str, Any]


@dataclass
class CheckResult:
    text: str
    status: str = OK
    figures: list[dict[str, Any]] = field(default_factory=list)


class Check(NamedTuple):
    group: str
    name: str
    run: Callable[[], CheckResult]


ListChecks = Callable[[str, bool], list[Check]]


def all_checks(device: str, quick: bool) -> list[Check]:
    from mindspeed_lite.bench.selftest import device as device_checks
    from mindspeed_lite.bench.selftest import numerics

    return [*device_checks.checks(device), *numerics.checks(device, quick)]


def run(
    device: str, *, quick: bool = False, facts: dict[str, Any] | None = None, seconds: float = SECONDS,
    tell: Progress = lambda done, total, what: None, plan: ListChecks = all_checks,
) -> dict[str, Any]:  # fmt: skip
    """Run every check on `device` and return the report.

    Args:
        facts: added to the report.
        seconds: limit of one check.
        tell: called with (done, total, next).
    """
    checks: list[Line] = []
    names: list[tuple[str, str]] = []
    environment: Any = None
    while True:
        has_started, since = False, time.monotonic()
        try:
            for message in isolated.messages(partial(_perform_rest, plan, device, quick, len(checks)), seconds):
                if has_started:
                    checks.append(message)
                else:
                    names, environment = message
                has_started, since = True, time.monotonic()
                tell(len(checks), len(names), names[len(checks)][1] if len(checks) < len(names) else "")
            break
        except isolated.ProcessEnded as error:
            remaining = names[len(checks) :] if has_started else [("device", "start of the self-test")]
            if remaining:
                checks.append(_line(*remaining[0], time.monotonic() - since, CheckResult(str(error), FAILED)))
            if len(remaining) < 2:
                break
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "quick": quick,
        "passed": all(each["status"] != FAILED for each in checks),
        "environment": environment,
        "facts": facts or {},
        "checks": checks,
        "to_report": [
            f"{each['group']}, {each['name']}, on {device}: {each['status']}: {each['text']}"
            for each in checks
            if each["status"] != OK
        ],
    }


def perform(check: Check) -> Line:
    began = time.monotonic()
    try:
        outcome = check.run()
    except Exception as error:
        from mindspeed_lite.bench.timing import format_error

        outcome = CheckResult(format_error(error), FAILED)
    return _line(check.group, check.name, time.monotonic() - began, outcome)


def _line(group: str, name: str, seconds: float, outcome: CheckResult) -> Line:
    return {"group": group, "name": name, "seconds": round(seconds, 3), **asdict(outcome)}


def _perform_rest(plan: ListChecks, device: str, quick: bool, done: int) -> Iterator[Any]:
    """Names of all checks and the environment, then lines of the checks from number `done` on."""
    from mindspeed_lite import platform
    from mindspeed_lite.bench import environment

    chosen = platform.choose(device)
    checks = plan(chosen.name, quick)
    yield [(check.group, check.name) for check in checks], environment.describe(chosen)
    if done:
        # Normally done by the first check, which reports errors.
        with contextlib.suppress(Exception):
            platform.activate(chosen.name)
    yield from map(perform, checks[done:])


def lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    passed: dict[str, list[Line]] = {}
    for check in report["checks"]:
        operator, _, case = check["name"].partition(" ")
        operator = operator.rstrip(",")
        if check["group"] == "device":
            rows.append((check["status"], f"device: {check['name']}", check["text"]))
        elif check["status"] == OK:
            passed.setdefault(operator, []).append(check)
        else:
            rows.append((check["status"], f"numerics: {operator}", f"{case}: {check['text']}"))
    return rows + [(OK, f"numerics: {name}", _summary(checks)) for name, checks in passed.items()]


def _summary(checks: list[Line]) -> str:
    figures = [(each["error"] / each["bound"], each["result"], check) for check in checks for each in check["figures"]]
    if not figures:
        return "its backend loads"
    share, result, check = max(figures, key=lambda figure: float(figure[0]))
    count = sum(bool(each["figures"]) for each in checks)
    case = check["name"].partition(" ")[2]
    return f"{count} case{'s' if count > 1 else ''}, nearest to its bound: {case}, {result} at {share:.0%}"
