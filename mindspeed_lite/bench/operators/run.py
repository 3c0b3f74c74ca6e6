"""Measures problems and builds the report: equivalence, times, findings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from mindspeed_lite.bench import ceiling, environment, timing
from mindspeed_lite.bench.operator_tables import PLAIN
from mindspeed_lite.bench.operators import equivalence
from mindspeed_lite.bench.tables import SEVERITIES
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import OURS, Contender, Function, OwnLayout, Problem, dtype_name
from mindspeed_lite.platform import Device

FORWARD = "forward"
BOTH = "forward+backward"

# How much slower than plain PyTorch is no warning.
_NEGLIGIBLE = 0.03

Progress = Callable[[int, int, str], None]


class Findings(list[dict[str, Any]]):
    def add(self, severity: str, text: str) -> None:
        finding = {"severity": severity, "arm": None, "text": text}
        if finding not in self:
            self.append(finding)


def run(
    problems: Sequence[Problem], device: Device, dtype: torch.dtype, effort: timing.Effort, *,
    quick: bool = False, command: Sequence[str] = (),
    tell: Progress = lambda done, total, what: None,
) -> dict[str, Any]:  # fmt: skip
    """The report; after Ctrl-C of finished problems, with `complete` false.

    tell: called before each step with (done, total, next).
    """
    findings, rows = Findings(), []
    ceilings: dict[str, dict[str, Any]] = {}
    complete = False
    unsubscribe = dispatch.on_fallback(
        lambda op, backend, why: findings.add("note", f"{op}: {backend} falls back to the reference: {'; '.join(why)}")
    )
    try:
        for number, problem in enumerate(problems):
            if problem.operator not in ceilings:
                tell(number, len(problems), "ceiling: a large matmul and a large copy")
                ceilings[problem.operator] = asdict(ceiling.measure(device.name, dtype))
            tell(number, len(problems), f"{problem.operator} {problem.name}")
            rows += measure(problem, effort, ceilings[problem.operator], findings)
        complete = True
    except KeyboardInterrupt:
        done = len({(row["operator"], row["case"]) for row in rows})
        findings.add("warning", f"interrupted after {done} of {len(problems)} cases")
    finally:
        unsubscribe()
    highest = max(ceilings.values(), key=lambda each: float(each["flops_per_second"]), default=None)
    if highest is not None:
        highest = highest | {"bytes_per_second": max(each["bytes_per_second"] for each in ceilings.values())}
    for row in rows:
        _judge(row, findings)
    return {
        "schema_version": 1,
        "kind": "bench-ops",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "title": f"Operators on {device.describe()}, {dtype_name(dtype)}",
        "command": list(command),
        "complete": complete,
        "settings": {
            "quick": quick,
            "operators": list(dict.fromkeys(problem.operator for problem in problems)),
            **asdict(effort),
        },
        "environment": environment.describe(device),
        "ceiling": highest,
        "findings": sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"])),
        "rows": rows,
    }


def measure(
    problem: Problem, effort: timing.Effort, reached: Mapping[str, Any], findings: Findings
) -> list[dict[str, Any]]:
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
            findings.add("note", f"{name} in {problem.operator}, not part of its time: {function.note}")
    rows = []
    for direction in (FORWARD,) if problem.both is None else (FORWARD, BOTH):
        steps = one_calls(functions, inputs, gradient, errors, backward=direction == BOTH)
        with torch.set_grad_enabled(direction == BOTH):
            timed, failed = timing.time_interleaved(steps, effort, problem.device)
        rows.append(_row(problem, direction, timed, errors | failed, reached))
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
        wrong = None
        try:
            function = contender.load()
            found = equivalence.outcome(function, inputs)
            if ours is not None and not problem.is_random:
                wrong = equivalence.disagreement(ours, found, problem.dtype)
        except Exception as error:
            wrong = timing.format_error(error)
        if wrong is not None:
            errors[contender.name] = wrong
            continue
        functions[contender.name] = function
        gradient = equivalence.output_gradient(found["output"]) if gradient is None else gradient
        if contender.name == OURS:
            ours = found
    return functions, gradient


def one_calls(
    functions: Mapping[str, Function], inputs: Sequence[torch.Tensor], gradient: torch.Tensor | None,
    errors: dict[str, str], *, backward: bool,
) -> dict[str, Callable[[], object]]:  # fmt: skip
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
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = tuple(map(equivalence.output_gradient, outputs))
    if not backward:
        return lambda: call(*inputs)
    wanted = [each for each in inputs if each.requires_grad]
    return lambda: torch.autograd.grad(call(*inputs), wanted, gradients, allow_unused=True)


def _row(
    problem: Problem, direction: str, timed: Mapping[str, timing.Timing], errors: Mapping[str, str],
    reached: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    work = problem.forward if direction == FORWARD or problem.both is None else problem.both
    least, bound, rate = max(
        (work.bytes / reached["bytes_per_second"], "memory", "bytes_per_second"),
        (work.flops / reached["flops_per_second"], "compute", "flops_per_second"),
    )
    names = ("seconds", "low", "high", "bytes_per_second", "flops_per_second", "of_ceiling")
    ratios = ("ratio", "ratio_low", "ratio_high")
    contenders = []
    for name in (each.name for each in problem.contenders):
        figures: dict[str, float | None] = dict.fromkeys((*names, *ratios))
        if found := timed.get(name):
            seconds = found.seconds
            values = (seconds, found.low, found.high, work.bytes / seconds, work.flops / seconds, least / seconds)
            figures |= dict(zip(names, values, strict=True))
            if ours := timed.get(OURS):
                figures |= dict(zip(ratios, found.over(ours), strict=True))
        contenders.append({"name": name, **figures, "error": errors.get(name)})
    return {
        "operator": problem.operator,
        "case": problem.name,
        "direction": direction,
        "device": problem.device,
        "dtype": dtype_name(problem.dtype),
        "bytes": work.bytes,
        "flops": work.flops,
        "bound": bound,
        "ceiling_per_second": reached[rate],
        "contenders": contenders,
    }


def _judge(row: Mapping[str, Any], findings: Findings) -> None:
    operator, where = row["operator"], f"{row['operator']}, {row['case']}, {row['direction']}"
    for contender in row["contenders"]:
        name, error, ratio = contender["name"], contender["error"], contender["ratio"]
        if error is not None:
            severity = "warning" if name in PLAIN or error.startswith(equivalence.DISAGREES) else "note"
            findings.add("failure" if name == OURS else severity, f"{name} did not run in {operator}: {error}")
        elif name in PLAIN and ratio is not None and ratio < 1 - _NEGLIGIBLE and contender["ratio_high"] < 1:
            text = f"{OURS} is slower than {name} in {where}: {name} takes {ratio:.2f}x of our time"
            findings.add("warning", text)
