"""Checks operators and references against float64 on the CPU, forward and backward.

Relative 2-norm error of at most 8 eps, and in 16 bits of at most twice the reference's plus one eps, as in
`--mindspeed-lite-verify` class ulp.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.bench import timing
from mindspeed_lite.bench.operators import equivalence
from mindspeed_lite.bench.selftest import FAILED, FALLBACK, OK, Check, CheckResult
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Function, Problem
from mindspeed_lite.ops.discovery import OPERATORS, cases

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUICK_SHAPES, _QUICK_DTYPES = 4, 2
_MOST_EPS = 8


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
    inputs = problem.make()
    ours_function, reference_function = (each.load() for each in problem.contenders[:2])
    refused = _refusal(problem.operator, device, ours_function, inputs)
    with _on_own_backend(problem.operator, "" if refused else device):
        ours = equivalence.outcome(ours_function, inputs)
    gradient = equivalence.output_gradient(ours["output"])
    suffix = ""
    try:
        reference = equivalence.outcome(reference_function, inputs, gradient)
    except Exception as error:  # out of memory or no kernel: no reference
        reference, suffix = {}, f"; the reference did not run: {timing.format_error(error)}"
    with dispatch.force(problem.operator, dispatch.REFERENCE):
        exact = equivalence.outcome(ours_function, [in_float64(each) for each in inputs], gradient.cpu().double())
    figures = [_figure(name, ours[name], reference.get(name), exact[name], problem.dtype) for name in exact]
    wrong = [each for each in figures if not _share(each) <= 1]
    text = "; ".join(map(_text, wrong or [max(figures, key=_share)]))
    status = FAILED if wrong else OK
    if refused:
        text += f"; computed by the reference: {refused}"
        status = FAILED if device == "npu" or status == FAILED else FALLBACK
    return CheckResult(text + suffix, status, figures)


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().cpu()
    return moved.double().requires_grad_(tensor.requires_grad) if moved.is_floating_point() else moved


def _backend(name: str, device: str) -> CheckResult:
    selected = dispatch.selected(name, device)
    if selected.reasons:
        return CheckResult(f"the reference, since {'; '.join(selected.reasons)}", FAILED)
    return CheckResult(selected.backend)


def _on_own_backend(name: str, device: str) -> contextlib.AbstractContextManager[None]:
    if device in dispatch.operator(name).backends and not dispatch.operator(name).unusable(device):
        return dispatch.force(name, device)
    return contextlib.nullcontext()


def _refusal(name: str, device: str, function: Function, inputs: Sequence[torch.Tensor]) -> str:
    try:
        with _on_own_backend(name, device), torch.no_grad():
            function(*equivalence.own(inputs))
    except RuntimeError as error:  # also device errors
        if "is forced and cannot serve" not in str(error):
            raise
        return timing.format_error(error)
    return ""


def _figure(
    name: str, ours: torch.Tensor, reference: torch.Tensor | None, exact: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    eps = torch.finfo(dtype).eps
    error, other = (None if x is None else equivalence.relative_error(x.cpu(), exact) for x in (ours, reference))
    bound = _MOST_EPS * eps
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    if is_narrow and other is not None and math.isfinite(other) and bool(exact.any()):
        bound = min(bound, 2 * other + eps)
    return {"result": name, "ours": error, "reference": other, "bound": bound}


def _share(figure: dict[str, Any]) -> float:
    return float(figure["ours"]) / float(figure["bound"])


def _text(figure: dict[str, Any]) -> str:
    other = "" if figure["reference"] is None else f", reference {figure['reference']:.2g}"
    return f"{figure['result']}: error {figure['ours']:.2g}, bound {figure['bound']:.2g}{other}"
