"""`doctor --selftest`: checks the device, and every operator against float64.

Checks run in a `worker` process; the next worker continues after a crash or hang. Report: schema_version, kind
"selftest", created, device, quick, passed, environment (as in `bench-ops`), facts, checks, to_report. A check has
group, name, status (ok, fallback, failed), text, seconds, and figures: relative errors `ours` and `reference` of output
and gradients, and `bound`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_lite.child_process import child_process

SCHEMA_VERSION = 2
KIND = "selftest"
SECONDS = 120.0

OK, FALLBACK, FAILED = "ok", "fallback", "failed"
GROUPS = ("device", "numerics")

Progress = Callable[[int, int, str], None]
Line = dict[str, Any]


@dataclass
class Outcome:
    text: str
    status: str = OK
    figures: list[dict[str, Any]] = field(default_factory=list)


class Check(NamedTuple):
    group: str
    name: str
    run: Callable[[], Outcome]


def run(
    device: str,
    *,
    quick: bool = False,
    facts: dict[str, Any] | None = None,
    seconds: float = SECONDS,
    tell: Progress = lambda done, total, what: None,
    worker: Sequence[str] = ("-m", "mindspeed_lite.bench.selftest.worker"),
) -> dict[str, Any]:
    """Report of every check on `device`.

    quick: fewer shapes and dtypes. facts: added to the report. seconds: limit of one check. tell: called with (done,
    total, next). worker: Python's arguments to start one.
    """
    checks: list[Line] = []
    environment: Any = None
    plan: list[list[str]] | None = None
    while plan is None or len(checks) < len(plan):
        arguments = [*worker, device, str(len(checks)), *(["--quick"] if quick else [])]
        lines, ending, elapsed = _work(arguments, seconds, len(checks), tell)
        started = next((line for line in lines if "plan" in line), None)
        checks += [line["check"] for line in lines if "check" in line]
        if started is None:
            checks.append(_failed("device", "start of the self-test", ending, elapsed))
            break
        plan, environment = plan or started["plan"], environment or started["environment"]
        if len(checks) < len(plan):
            group, name = plan[len(checks)]
            checks.append(_failed(group, name, ending, elapsed))
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


def _failed(group: str, name: str, text: str, seconds: float) -> Line:
    return {"group": group, "name": name, "status": FAILED, "text": text, "seconds": seconds, "figures": []}


def _work(arguments: list[str], seconds: float, done: int, tell: Progress) -> tuple[list[Line], str, float]:
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        path, log = Path(folder, "lines"), Path(folder, "log")
        path.touch()
        command = [sys.executable, *arguments, "--lines", str(path)]
        with (
            open(log, "wb") as output,
            child_process(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child,
        ):
            code, elapsed = _watch(child, path, seconds, done, tell)
        if code is None:
            ending = f"did not end within {seconds:g} s"
        elif code < 0:
            ending = f"ended the process with {signal.Signals(-code).name}"
        else:
            ending = f"ended the process with exit code {code}"
        printed = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = " | ".join(filter(None, printed[-4:]))[-400:]
        return _read(path), f"{ending}: {last}" if last else ending, round(elapsed, 3)


def _watch(
    child: subprocess.Popen[bytes], path: Path, seconds: float, done: int, tell: Progress
) -> tuple[int | None, float]:
    size, since = -1, time.monotonic()
    while True:
        code = child.poll()
        if path.stat().st_size != size:
            size, since = path.stat().st_size, time.monotonic()
            lines = _read(path)
            plan: list[list[str]] = next((line["plan"] for line in lines if "plan" in line), [])
            ended = done + sum("check" in line for line in lines)
            tell(ended, len(plan), plan[ended][1] if ended < len(plan) else "")
        elapsed = time.monotonic() - since
        if code is not None or elapsed > seconds:
            return code, elapsed
        time.sleep(0.05)


def _read(path: Path) -> list[Line]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # unfinished line
            break
    return found


def lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    passed: dict[str, list[Line]] = {}
    for check in sorted(report["checks"], key=lambda each: GROUPS.index(each["group"])):
        name, _, case = check["name"].partition(" ")
        name = name.rstrip(",")
        if check["group"] == "device":
            rows.append((check["status"], f"device: {check['name']}", check["text"]))
        elif check["status"] == OK:
            passed.setdefault(name, []).append(check)
        else:
            rows.append((check["status"], f"numerics: {name}", f"{case}: {check['text']}"))
    return rows + [(OK, f"numerics: {name}", _summary(checks)) for name, checks in passed.items()]


def _summary(checks: list[Line]) -> str:
    figures = [(each["ours"] / each["bound"], each["result"], check) for check in checks for each in check["figures"]]
    if not figures:
        return "its backend loads"
    share, result, check = max(figures, key=lambda figure: float(figure[0]))
    count = sum(bool(each["figures"]) for each in checks)
    case = check["name"].partition(" ")[2]
    return f"{count} case{'s' if count > 1 else ''}, nearest to its bound: {case}, {result} at {share:.0%}"
