"""`doctor --selftest`: checks the device, and every operator against float64.

Checks run in a process of their own; after a crash or hang a new one continues. Figures of a check: relative `error`
and `bound` of output and gradients.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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

    def receive(message: Any) -> None:
        nonlocal names, environment
        if isinstance(message, dict):
            checks.append(message)
        else:
            names, environment = message
        tell(len(checks), len(names), names[len(checks)][1] if len(checks) < len(names) else "")

    while not names or len(checks) < len(names):
        has_started, ending, elapsed = _run_rest(plan, device, quick, len(checks), seconds, receive)
        if has_started and len(checks) == len(names):
            break
        name = names[len(checks)] if has_started else ("device", "start of the self-test")
        checks.append(_line(*name, elapsed, CheckResult(ending, FAILED)))
        if not has_started:
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


def _run_rest(
    plan: ListChecks, device: str, quick: bool, done: int, seconds: float, receive: Callable[[Any], None]
) -> tuple[bool, str, float]:
    """Run checks from number `done` on in a process: whether it started, how it ended, seconds since its last check."""
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        log = Path(folder, "log")
        process = context.Process(target=_work, args=(sender, str(log), plan, device, quick, done), daemon=True)
        process.start()
        sender.close()
        has_started, since, ending = False, time.monotonic(), f"did not end within {seconds:g} s"
        try:
            while results.poll(seconds):
                receive(results.recv())
                has_started, since = True, time.monotonic()
        except EOFError:
            process.join(seconds)
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            ending = f"ended the process with {how}"
        finally:
            process.kill()
            process.join()
        printed = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    last = " | ".join(filter(None, (line.strip() for line in printed[-4:])))[-400:]
    return has_started, f"{ending}: {last}" if last else ending, time.monotonic() - since


def _work(results: Connection, log: str, plan: ListChecks, device: str, quick: bool, done: int) -> None:
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from mindspeed_lite import platform
    from mindspeed_lite.bench import environment

    chosen = platform.choose(device)
    checks = plan(chosen.name, quick)
    results.send(([(check.group, check.name) for check in checks], environment.describe(chosen)))
    if done:
        # Normally done by the first check, which reports errors.
        with contextlib.suppress(Exception):
            platform.activate(chosen.name)
    for check in checks[done:]:
        results.send(perform(check))


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
