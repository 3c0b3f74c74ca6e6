"""The self-test: every operator on the device at hand, its numbers and its speed, and the device itself. One report.

    run(device) -> report         starts workers, judges nothing itself, and always comes back with a report
    lines(report) -> [str]        the report as a short table

The checks run in a process of their own (`worker`). One that crashes or hangs is a failed check, and the next worker
goes on behind it: on a new device this is what a self-test is for.

The report: schema_version, kind "selftest", created, device, quick, passed, environment (as in a report of
bench-ops), facts (what the caller knows beyond), ceiling, checks, to_report. A check has group, name, status (ok,
slower, fallback, failed), text, seconds, and figures, by group:

numerics    for the output and the gradient of each input: `ours` and `plain`, relative errors against float64 in the
            2-norm, and the `bound` for ours
speed       the rows of bench-ops
device      none
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.selftest.check import FAILED, GROUPS, OK
from mindspeed_lite.child_process import child_process

SCHEMA_VERSION = 1
KIND = "selftest"
SECONDS = 120.0

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Run:
    """What one worker left: its lines, how it ended (None: it was stopped), and the end of what it printed."""

    lines: list[dict[str, Any]]
    code: int | None
    said: str

    def first(self, key: str) -> Any:
        return next((line[key] for line in self.lines if key in line), None)


def run(
    device: str,
    *,
    quick: bool = False,
    facts: dict[str, Any] | None = None,
    seconds: float = SECONDS,
    tell: Tell = lambda done, total, what: None,
    worker: Sequence[str] = ("-m", "mindspeed_lite.bench.selftest.worker"),
) -> dict[str, Any]:
    """The report of every check on `device`.

    quick: few and tiny cases, no ceiling. facts: put into the report. seconds: how long one check may take. tell:
    called as checks end, with how many are done, how many there are, and the name of the next. worker: arguments
    to Python that start one.
    """
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "quick": quick,
        "passed": False,
        "environment": None,
        "facts": facts or {},
        "ceiling": None,
        "checks": [],
        "to_report": [],
    }
    checks: list[dict[str, Any]] = report["checks"]
    plan: list[list[str]] | None = None
    while plan is None or len(checks) < len(plan):
        one = _work([*worker, device, str(len(checks)), *(["--quick"] if quick else [])], seconds, len(checks), tell)
        plan = plan or one.first("plan")
        report["environment"] = report["environment"] or one.first("environment")
        report["ceiling"] = report["ceiling"] or one.first("ceiling")
        checks += [line["check"] for line in one.lines if "check" in line]
        if plan is None or one.first("plan") is None:
            # It does not even start any more: nothing further can be learnt.
            checks.append(_failed("device", "start of the self-test", _how(one, seconds), 0.0))
            break
        if len(checks) < len(plan):
            group, name = plan[len(checks)]
            checks.append(_failed(group, name, _how(one, seconds), 0.0))
    report["to_report"] = [
        f"{each['group']}, {each['name']}, on {device}: {each['status']}: {each['text']}"
        for each in checks
        if each["status"] != OK
    ]
    report["passed"] = not any(each["status"] == FAILED for each in checks)
    return report


def _failed(group: str, name: str, text: str, seconds: float) -> dict[str, Any]:
    return {"group": group, "name": name, "status": FAILED, "text": text, "seconds": seconds, "figures": []}


def _how(one: _Run, seconds: float) -> str:
    if one.code is None:
        ending = f"did not end within {seconds:g} s"
    elif one.code < 0:
        ending = f"ended the process with {signal.Signals(-one.code).name}"
    else:
        ending = f"ended the process with exit code {one.code}"
    return f"{ending}: {one.said}" if one.said else ending


def _work(arguments: list[str], seconds: float, done: int, tell: Tell) -> _Run:
    """Run one worker until it ends, or until one of its checks takes more than `seconds`."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        path, log = Path(folder, "lines"), Path(folder, "log")
        path.touch()
        command = [sys.executable, *arguments, "--lines", str(path)]
        with (
            open(log, "wb") as output,
            child_process(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child,
        ):
            code = _watch(child, path, seconds, done, tell)
        said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return _Run(_read(path), code, " | ".join(filter(None, said[-4:]))[-400:])


def _watch(child: subprocess.Popen[bytes], path: Path, seconds: float, done: int, tell: Tell) -> int | None:
    size, since = -1, time.monotonic()
    plan: list[list[str]] = []
    while True:
        code = child.poll()
        now = path.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
            lines = _read(path)
            plan = plan or next((line["plan"] for line in lines if "plan" in line), [])
            ended = done + sum("check" in line for line in lines)
            tell(ended, len(plan), plan[ended][1] if ended < len(plan) else "")
        if code is not None:
            return code
        if time.monotonic() - since > seconds:
            return None
        time.sleep(0.05)


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # it is being written, or its writer ended in the middle
            break
    return found


def lines(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(status, subject, text) for a table: numbers that are right are one line for each operator."""
    rows: list[tuple[str, str, str]] = []
    for group in GROUPS:
        right: dict[str, list[dict[str, Any]]] = {}
        others = []
        for check in (each for each in report["checks"] if each["group"] == group):
            name, _, case = check["name"].partition(" ")
            if group == "device":
                rows.append((check["status"], f"{group}: {check['name']}", check["text"]))
            elif group == "numerics" and check["status"] == OK:
                right.setdefault(name.rstrip(","), []).append(check)
            else:
                others.append((check["status"], f"{group}: {name.rstrip(',')}", f"{case}: {check['text']}"))
        rows += [(OK, f"{group}: {name}", _summary(checks)) for name, checks in right.items()]
        rows += others
    return rows


def _summary(checks: list[dict[str, Any]]) -> str:
    """How many problems are solved, and which comes nearest to its bound."""
    solved = [check for check in checks if check["figures"]]
    if not solved:
        return "its backend loads"

    def share(figure: dict[str, Any]) -> float:
        return float(figure["ours"]) / float(figure["bound"])

    worst = max(solved, key=lambda check: max(map(share, check["figures"])))
    figure = max(worst["figures"], key=share)
    return (
        f"{len(solved)} problem{'s' if len(solved) > 1 else ''}, nearest to its bound: "
        f"{worst['name'].partition(' ')[2]}, {figure['result']} at {share(figure):.0%}"
    )
