"""Runs cases and makes the report: equivalence first, then times, then findings."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from mindspeed_lite.bench import ceiling, compose, environment, timing
from mindspeed_lite.bench.operators import OURS, BoundCase, OwnLayout, Runner, Work, dtype_name, earlier, equivalence
from mindspeed_lite.ops import dispatch
from mindspeed_lite.platform import Device

FORWARD = "forward"
BOTH = "forward+backward"
DIRECTIONS = (FORWARD, BOTH)

# Contenders a user has without installing or compiling anything: to be slower than they is worth a warning.
_PLAIN = ("torch", "torch sdpa")
_NEGLIGIBLE = 0.03
_SEVERITIES = ("failure", "warning", "note")

Tell = Callable[[int, int, str], None]


def run(
    cases: Sequence[BoundCase],
    device: Device,
    dtype: torch.dtype,
    effort: timing.Effort,
    *,
    quick: bool = False,
    command: Sequence[str] = (),
    before: earlier.Earlier | None = None,
    tell: Tell = lambda done, total, what: None,
) -> dict[str, Any]:
    """The report of all cases; after Ctrl-C that of those finished, with `complete` false.

    tell: called before every step with how many are done, how many there are, and what comes.
    """
    report: dict[str, Any] = {
        "schema_version": earlier.SCHEMA_VERSION,
        "kind": earlier.KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "title": f"Operators on {device.describe()}, {dtype_name(dtype)}",
        "command": list(command),
        "complete": False,
        "settings": _settings(effort, quick, cases),
        "environment": environment.describe(device),
        "ceiling": None,
        "findings": [],
        "rows": [],
    }
    findings: list[dict[str, Any]] = report["findings"]
    rows: list[dict[str, Any]] = report["rows"]
    unsubscribe = dispatch.on_fallback(
        lambda op, backend, reasons: _find(findings, "note", _fallback(op, backend, reasons))
    )
    # What the rows of an operator are held against: measured before and after it, and the higher counts. A machine is
    # not equally fast all the time.
    beside: dict[str, Mapping[str, Any] | None] = {}

    def look_up(*operators: str) -> None:
        reached = asdict(ceiling.measure(device.name, dtype))
        report["ceiling"] = compose.higher_ceiling(report["ceiling"], reached)
        beside.update({name: compose.higher_ceiling(beside.get(name), reached) for name in operators})

    try:
        last = ""
        for number, case in enumerate(cases):
            if case.operator != last:
                tell(number, len(cases), "ceiling: a large matmul and a large copy")
                look_up(case.operator, *filter(None, [last]))
                last = case.operator
            tell(number, len(cases), f"{case.operator} {case.name}")
            rows += measure(case, effort, findings)
        report["complete"] = True
        with contextlib.suppress(Exception):  # such as no room left on a device; the first measurement stands
            look_up(last)
    except KeyboardInterrupt:
        done = len({(row["operator"], row["case"]) for row in rows})
        _find(findings, "warning", f"interrupted after {done} of {len(cases)} cases")
    finally:
        unsubscribe()
    for row in rows:
        relate(row, beside[row["operator"]] or report["ceiling"])
        if before is not None:
            row["earlier"] = earlier.judge(row, report["ceiling"], before)
        _judge(row, findings)
    if before is not None:
        _say_how_comparable(report, before)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding["severity"]))
    return report


def measure(
    case: BoundCase, effort: timing.Effort, findings: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The rows of one case, a direction each, not yet related to a ceiling; what is not timed goes to `findings`."""
    errors: dict[str, str] = {}
    functions: dict[str, equivalence.Function] = {}
    inputs: tuple[torch.Tensor, ...] = ()
    gradient: torch.Tensor | None = None
    try:
        inputs = case.make()
        functions, gradient = equivalent_contenders(case, case.contenders, inputs, errors)
    except Exception as error:  # the inputs alone may be too large for the device
        errors = {contender.name: timing.said(error) for contender in case.contenders}
    for name, function in functions.items():
        if findings is not None and isinstance(function, OwnLayout):
            _find(findings, "note", f"{name} in {case.operator}, not part of its time: {function.note}")
    rows = []
    for direction in DIRECTIONS if case.both is not None else (FORWARD,):
        steps: dict[str, Callable[[], object]] = {}
        for name, function in functions.items():
            try:
                steps[name] = one_call(function, inputs, gradient, backward=direction == BOTH)
            except Exception as error:  # no room for inputs of its own
                errors[name] = timing.said(error)
        with torch.set_grad_enabled(direction == BOTH):
            timed, failed = timing.race(steps, effort, ceiling.synchronizer(case.device))
        rows.append(_row(case, direction, timed, errors | failed))
    del inputs, functions, gradient
    gc.collect()
    if case.device != "cpu":
        getattr(torch, case.device).empty_cache()
    return rows


def equivalent_contenders(
    case: BoundCase, contenders: Sequence[Runner], inputs: Sequence[torch.Tensor], errors: dict[str, str]
) -> tuple[dict[str, equivalence.Function], torch.Tensor | None]:
    """The contenders that load, run and agree with ours, and a gradient for the output; others go to `errors`."""
    functions: dict[str, equivalence.Function] = {}
    ours: dict[str, torch.Tensor] | None = None
    gradient: torch.Tensor | None = None
    for contender in contenders:
        try:
            function = contender.load()
            found = equivalence.outcome(function, inputs)
            wrong = None if ours is None or case.is_random else equivalence.disagreement(ours, found, case.dtype)
        except Exception as error:  # a peer's own, a compiler's, out of memory: the reader is told
            errors[contender.name] = timing.said(error)
            continue
        if contender.name == OURS:
            ours, gradient = found, equivalence.output_gradient(found["output"])
        if wrong is None:
            functions[contender.name] = function
            gradient = equivalence.output_gradient(found["output"]) if gradient is None else gradient
        else:
            errors[contender.name] = wrong
    return functions, gradient


def one_call(
    function: equivalence.Function, inputs: Sequence[torch.Tensor], gradient: torch.Tensor | None, *, backward: bool
) -> Callable[[], object]:
    """One call. Gradients are returned, not accumulated, so that nothing has to be cleared between calls."""
    if isinstance(function, OwnLayout):
        return _one_call_of_own(function, inputs, backward)
    if not backward:
        return lambda: function(*inputs)
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def _one_call_of_own(function: OwnLayout, inputs: Sequence[torch.Tensor], backward: bool) -> Callable[[], object]:
    """One call on the library's own inputs, made here; what it writes over them changes numbers, not the work."""
    own = function.arrange(*(each.detach() for each in inputs))
    if not backward:
        return lambda: function.call(*own)
    for each in own:
        each.requires_grad_()
    with torch.enable_grad():
        outputs = function.call(*own)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [equivalence.output_gradient(each) for each in several]
    return lambda: torch.autograd.grad(function.call(*own), own, gradients)


def _row(
    case: BoundCase,
    direction: str,
    timed: Mapping[str, timing.Timing],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    work = case.forward if direction == FORWARD or case.both is None else case.both
    return {
        "operator": case.operator,
        "case": case.name,
        "direction": direction,
        "device": case.device,
        "dtype": dtype_name(case.dtype),
        "bytes": work.bytes,
        "flops": work.flops,
        "bound": None,
        "ceiling_per_second": None,
        "contenders": [_contender(contender.name, timed, errors, work) for contender in case.contenders],
        "earlier": None,
    }


def relate(row: dict[str, Any], reached: Mapping[str, Any]) -> None:
    """Say in a row which ceiling is the nearer one, and what share of it each contender reaches."""
    seconds = {
        "memory": row["bytes"] / reached["bytes_per_second"],
        "compute": row["flops"] / reached["flops_per_second"],
    }
    row["bound"] = "memory" if seconds["memory"] >= seconds["compute"] else "compute"
    row["ceiling_per_second"] = reached["bytes_per_second" if row["bound"] == "memory" else "flops_per_second"]
    for contender in row["contenders"]:
        contender["of_ceiling"] = contender["seconds"] and seconds[row["bound"]] / contender["seconds"]


def _contender(name: str, timed: Mapping[str, timing.Timing], errors: Mapping[str, str], work: Work) -> dict[str, Any]:
    found = timed.get(name)
    ours = timed.get(OURS)
    ratio = timing.ratio(found, ours) if found is not None and ours is not None else None
    return {
        "name": name,
        "seconds": found and found.seconds,
        "low": found and found.low,
        "high": found and found.high,
        "bytes_per_second": found and work.bytes / found.seconds,
        "flops_per_second": found and work.flops / found.seconds,
        "of_ceiling": None,
        "ratio": ratio and ratio.ratio,
        "ratio_low": ratio and ratio.low,
        "ratio_high": ratio and ratio.high,
        "error": errors.get(name),
    }


def _settings(effort: timing.Effort, quick: bool, cases: Sequence[BoundCase]) -> dict[str, Any]:
    """As in a report of `bench`; what has no meaning here is null."""
    return {
        "repeats": effort.rounds[0],
        "warmup": effort.warmup,
        "steps": None,
        "timeout": None,
        "allocator": None,
        "mode": None,
        "rounding_baseline": None,
        "beside": None,
        "confidence": timing.CONFIDENCE,
        "quick": quick,
        "operators": list(dict.fromkeys(case.operator for case in cases)),
        "rounds_at_most": effort.rounds[1],
        "sample_seconds": effort.sample_seconds,
    }


def _judge(row: Mapping[str, Any], findings: list[dict[str, Any]]) -> None:
    """What a row has to be said about."""
    where = f"{row['operator']}, {row['case']}, {row['direction']}"
    for contender in row["contenders"]:
        name, error, ratio = contender["name"], contender["error"], contender["ratio"]
        if error is not None:
            _find(findings, _severity(name, error), f"{name} did not run in {where}: {error}")
        elif name != OURS and ratio is not None and ratio < 1 - _NEGLIGIBLE and contender["ratio_high"] < 1:
            severity = "warning" if name in _PLAIN else "note"
            text = f"mindspeed_lite is slower than {name} in {where}: {name} takes {ratio:.2f}x of our time"
            _find(findings, severity, text)
    since = row["earlier"]
    if since is not None and since["verdict"] == "regression":
        _find(findings, "failure", f"Regression in {where}: {since['ratio']:,.2f}x of the earlier run.")


def _severity(name: str, error: str) -> str:
    if name == OURS:
        return "failure"
    return "warning" if name in _PLAIN or error.startswith(equivalence.DISAGREES) else "note"


def _say_how_comparable(report: Mapping[str, Any], before: earlier.Earlier) -> None:
    findings, rows = report["findings"], report["rows"]
    device = report["environment"]["device"]
    if device != before.device:
        _find(findings, "warning", f"the earlier run was on another device: {before.device}")
    unknown = sum(row["earlier"] is None for row in rows)
    if unknown:
        _find(findings, "note", f"{unknown} of {len(rows)} rows have no counterpart in the earlier run")


def _fallback(op: str, backend: str, reasons: Sequence[str]) -> str:
    return f"{op}: {backend} falls back to the reference: {'; '.join(reasons)}"


def _find(findings: list[dict[str, Any]], severity: str, text: str) -> None:
    finding = {"severity": severity, "arm": None, "text": text}
    if finding not in findings:
        findings.append(finding)
