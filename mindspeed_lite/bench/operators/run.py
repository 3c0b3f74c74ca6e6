"""Measures problems and builds the report: equivalence, times, findings."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from mindspeed_lite.bench import ceiling, compose, environment, timing
from mindspeed_lite.bench.operators import earlier, equivalence
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import OURS, Contender, Function, OwnLayout, Problem, dtype_name
from mindspeed_lite.platform import Device

FORWARD = "forward"
BOTH = "forward+backward"

# Always available contenders: being slower than these is a warning.
_BASELINES = ("torch", "torch sdpa")
_NEGLIGIBLE = 0.03
_SEVERITIES = ("failure", "warning", "note")

Progress = Callable[[int, int, str], None]
Findings = list[dict[str, Any]]


def run(
    problems: Sequence[Problem],
    device: Device,
    dtype: torch.dtype,
    effort: timing.Effort,
    *,
    quick: bool = False,
    command: Sequence[str] = (),
    before: earlier.Earlier | None = None,
    tell: Progress = lambda done, total, what: None,
) -> dict[str, Any]:
    """The report; after Ctrl-C of finished problems, with `complete` false.

    tell: called before each step with (done, total, next).
    """
    findings: Findings = []
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "schema_version": earlier.SCHEMA_VERSION,
        "kind": earlier.KIND,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "title": f"Operators on {device.describe()}, {dtype_name(dtype)}",
        "command": list(command),
        "complete": False,
        "settings": _settings(effort, quick, problems),
        "environment": environment.describe(device),
        "ceiling": None,
        "findings": findings,
        "rows": rows,
    }
    unsubscribe = dispatch.on_fallback(
        lambda op, backend, why: _find(
            findings, "note", f"{op}: {backend} falls back to the reference: {'; '.join(why)}"
        )
    )
    # Measured before and after an operator; the higher counts, since machine speed varies.
    ceilings: dict[str, Mapping[str, Any] | None] = {}

    def measure_ceiling(*operators: str) -> None:
        reached = asdict(ceiling.measure(device.name, dtype))
        report["ceiling"] = compose.higher_ceiling(report["ceiling"], reached)
        ceilings.update({name: compose.higher_ceiling(ceilings.get(name), reached) for name in operators})

    try:
        last = ""
        for number, problem in enumerate(problems):
            if problem.operator != last:
                tell(number, len(problems), "ceiling: a large matmul and a large copy")
                measure_ceiling(problem.operator, *filter(None, [last]))
                last = problem.operator
            tell(number, len(problems), f"{problem.operator} {problem.name}")
            rows += measure(problem, effort, findings)
        report["complete"] = True
        with contextlib.suppress(Exception):  # such as out of memory; the first measurement remains
            measure_ceiling(last)
    except KeyboardInterrupt:
        done = len({(row["operator"], row["case"]) for row in rows})
        _find(findings, "warning", f"interrupted after {done} of {len(problems)} cases")
    finally:
        unsubscribe()
    for row in rows:
        add_ceiling(row, ceilings[row["operator"]] or report["ceiling"])
        if before is not None:
            row["earlier"] = earlier.judge(row, report["ceiling"], before)
        _judge(row, findings)
    if before is not None:
        if before.device != report["environment"]["device"]:
            _find(findings, "warning", f"the earlier run was on another device: {before.device}")
        if unknown := sum(row["earlier"] is None for row in rows):
            _find(findings, "note", f"{unknown} of {len(rows)} rows have no counterpart in the earlier run")
    findings.sort(key=lambda finding: _SEVERITIES.index(finding["severity"]))
    return report


def measure(problem: Problem, effort: timing.Effort, findings: Findings) -> list[dict[str, Any]]:
    errors: dict[str, str] = {}
    functions: dict[str, Function] = {}
    inputs: tuple[torch.Tensor, ...] = ()
    gradient: torch.Tensor | None = None
    try:
        inputs = problem.make()
        functions, gradient = equivalent_contenders(problem, problem.contenders, inputs, errors)
    except Exception as error:
        errors = {contender.name: timing.format_error(error) for contender in problem.contenders}
    for name, function in functions.items():
        if isinstance(function, OwnLayout):
            _find(findings, "note", f"{name} in {problem.operator}, not part of its time: {function.note}")
    rows = []
    for direction in (FORWARD,) if problem.both is None else (FORWARD, BOTH):
        steps = one_calls(functions, inputs, gradient, errors, backward=direction == BOTH)
        with torch.set_grad_enabled(direction == BOTH):
            timed, failed = timing.time_interleaved(steps, effort, problem.device)
        rows.append(_row(problem, direction, timed, errors | failed))
    del inputs, functions, gradient
    gc.collect()
    if problem.device != "cpu":
        getattr(torch, problem.device).empty_cache()
    return rows


def equivalent_contenders(
    problem: Problem, contenders: Sequence[Contender], inputs: Sequence[torch.Tensor], errors: dict[str, str]
) -> tuple[dict[str, Function], torch.Tensor | None]:
    functions: dict[str, Function] = {}
    ours: dict[str, torch.Tensor] | None = None
    gradient: torch.Tensor | None = None
    for contender in contenders:
        try:
            function = contender.load()
            found = equivalence.outcome(function, inputs)
            wrong = None
            if ours is not None and not problem.is_random:
                wrong = equivalence.disagreement(ours, found, problem.dtype)
        except Exception as error:
            errors[contender.name] = timing.format_error(error)
            continue
        if wrong is not None:
            errors[contender.name] = wrong
            continue
        functions[contender.name] = function
        gradient = equivalence.output_gradient(found["output"]) if gradient is None else gradient
        if contender.name == OURS:
            ours = found
    return functions, gradient


def one_calls(
    functions: Mapping[str, Function],
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor | None,
    errors: dict[str, str],
    *,
    backward: bool,
) -> dict[str, Callable[[], object]]:
    """One call per function. Gradients are returned, not accumulated: nothing to clear."""
    calls: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        try:
            calls[name] = _one_call(function, inputs, gradient, backward)
        except Exception as error:
            errors[name] = timing.format_error(error)
    return calls


def _one_call(
    function: Function, inputs: Sequence[torch.Tensor], gradient: torch.Tensor | None, backward: bool
) -> Callable[[], object]:
    call: Callable[..., Any] = function
    gradients: tuple[torch.Tensor | None, ...] = (gradient,)
    if isinstance(function, OwnLayout):
        # Own inputs of the library; overwriting them does not change the work.
        call = function.call
        wants = [each.requires_grad for each in inputs]
        inputs = function.arrange(*(each.detach() for each in inputs))
        if backward and any(wants):
            inputs = [each.requires_grad_() if each.is_floating_point() else each for each in inputs]
            with torch.enable_grad():
                outputs = call(*inputs)
            gradients = tuple(
                equivalence.output_gradient(each) for each in (outputs if isinstance(outputs, tuple) else (outputs,))
            )
    if not backward:
        return lambda: call(*inputs)
    wanted = [each for each in inputs if each.requires_grad]
    return lambda: torch.autograd.grad(call(*inputs), wanted, gradients, allow_unused=True)


def _row(
    problem: Problem, direction: str, timed: Mapping[str, timing.Timing], errors: Mapping[str, str]
) -> dict[str, Any]:
    work = problem.forward if direction == FORWARD or problem.both is None else problem.both
    contenders = []
    for name in (each.name for each in problem.contenders):
        found, ours = timed.get(name), timed.get(OURS)
        ratio = timing.ratio(found, ours) if found is not None and ours is not None else None
        contenders.append(
            {
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
        )
    return {
        "operator": problem.operator,
        "case": problem.name,
        "direction": direction,
        "device": problem.device,
        "dtype": dtype_name(problem.dtype),
        "bytes": work.bytes,
        "flops": work.flops,
        "bound": None,
        "ceiling_per_second": None,
        "contenders": contenders,
        "earlier": None,
    }


def add_ceiling(row: dict[str, Any], reached: Mapping[str, Any]) -> None:
    seconds = {
        "memory": row["bytes"] / reached["bytes_per_second"],
        "compute": row["flops"] / reached["flops_per_second"],
    }
    row["bound"] = "memory" if seconds["memory"] >= seconds["compute"] else "compute"
    row["ceiling_per_second"] = reached["bytes_per_second" if row["bound"] == "memory" else "flops_per_second"]
    for contender in row["contenders"]:
        contender["of_ceiling"] = contender["seconds"] and seconds[row["bound"]] / contender["seconds"]


def _settings(effort: timing.Effort, quick: bool, problems: Sequence[Problem]) -> dict[str, Any]:
    absent = ("steps", "timeout", "allocator", "mode", "rounding_baseline", "beside")
    return dict.fromkeys(absent) | {
        "repeats": effort.rounds[0],
        "warmup": effort.warmup,
        "confidence": timing.CONFIDENCE,
        "quick": quick,
        "operators": list(dict.fromkeys(problem.operator for problem in problems)),
        "rounds_at_most": effort.rounds[1],
        "sample_seconds": effort.sample_seconds,
    }


def _judge(row: Mapping[str, Any], findings: Findings) -> None:
    where = f"{row['operator']}, {row['case']}, {row['direction']}"
    for contender in row["contenders"]:
        name, error, ratio = contender["name"], contender["error"], contender["ratio"]
        if error is not None:
            severity = "warning" if name in _BASELINES or error.startswith(equivalence.DISAGREES) else "note"
            severity = "failure" if name == OURS else severity
            _find(findings, severity, f"{name} did not run in {row['operator']}, {row['case']}: {error}")
        elif name in _BASELINES and ratio is not None and ratio < 1 - _NEGLIGIBLE and contender["ratio_high"] < 1:
            _find(
                findings, "warning", f"{OURS} is slower than {name} in {where}: {name} takes {ratio:.2f}x of our time"
            )
    since = row["earlier"]
    if since is not None and since["verdict"] == "regression":
        _find(findings, "failure", f"Regression in {where}: {since['ratio']:,.2f}x of the earlier run.")


def _find(findings: Findings, severity: str, text: str) -> None:
    finding = {"severity": severity, "arm": None, "text": text}
    if finding not in findings:
        findings.append(finding)
