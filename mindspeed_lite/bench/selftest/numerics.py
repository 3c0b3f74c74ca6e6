"""Checks every operator against its reference in float64, forward and backward, as `--mindspeed-lite-verify` does."""

from __future__ import annotations

import contextlib
import functools

import torch

from mindspeed_lite.bench import timing
from mindspeed_lite.bench.selftest import FAILED, FALLBACK, OK, Check, CheckResult
from mindspeed_lite.comparison import Finding, compare
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Problem
from mindspeed_lite.ops.discovery import OPERATORS, cases

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUICK_SHAPES, _QUICK_DTYPES = 4, 2


def checks(device: str, quick: bool) -> list[Check]:
    found = [Check("numerics", f"{name}, backend", functools.partial(_backend, name, device)) for name in OPERATORS]
    for each in problems(device, quick):
        found.append(Check("numerics", f"{each.operator} {each.name}", functools.partial(judge, each, device)))
    return found


def problems(device: str, quick: bool, backend: str = "") -> list[Problem]:
    """Every shape in every dtype; quick: first shapes, one dtype per width.

    backend: whose shapes; default: the device's.
    """
    return [
        cases(name).problem(text, device, dtype)
        for name in OPERATORS
        for dtype in _DTYPES[: _QUICK_DTYPES if quick else None]
        for text in cases(name).checked(backend or device)[: _QUICK_SHAPES if quick else None]
    ]


def judge(problem: Problem, device: str) -> CheckResult:
    refused = ""
    try:
        with _on_own_backend(problem.operator, device):
            findings = _findings(problem)
    except RuntimeError as error:  # also device errors
        if "is forced and cannot serve" not in str(error):
            raise
        refused = f"; computed by the reference: {timing.format_error(error)}"
        findings = _findings(problem)
    wrong = [each for each in findings if not each.share <= 1]
    text = "; ".join(map(_text, wrong or [max(findings, key=lambda each: each.share)]))
    status = FALLBACK if refused else OK
    if wrong or (refused and device == "npu"):
        status = FAILED
    figures = [{"result": each.name, "error": each.error, "bound": each.bound} for each in findings]
    return CheckResult(text + refused, status, figures)


def _findings(problem: Problem) -> list[Finding]:
    """Output without gradients, output, and gradients."""
    ours, reference = (each.load() for each in problem.contenders[:2])
    inputs = {f"input {place}": each for place, each in enumerate(problem.make(), 1)}
    found: list[Finding] = []
    if any(each.requires_grad for each in inputs.values()):
        constants = {name: each.detach() for name, each in inputs.items()}
        (output,), _ = compare("ulp", ours, reference, constants, True, 2, torch.float64)
        found.append(output._replace(name="output without gradients"))
    return found + compare("ulp", ours, reference, inputs, True, 2, torch.float64)[0]


def _backend(name: str, device: str) -> CheckResult:
    selected = dispatch.selected(name, device)
    if selected.reasons:
        return CheckResult(f"the reference, since {'; '.join(selected.reasons)}", FAILED)
    return CheckResult(selected.backend)


def _on_own_backend(name: str, device: str) -> contextlib.AbstractContextManager[None]:
    if device in dispatch.operator(name).backends and not dispatch.operator(name).unusable(device):
        return dispatch.force(name, device)
    return contextlib.nullcontext()


def _text(finding: Finding) -> str:
    return finding.problem or f"{finding.name}: error {finding.error:.2g}, bound {finding.bound:.2g}"
