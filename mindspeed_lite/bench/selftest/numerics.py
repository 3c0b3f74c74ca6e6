"""Checks every operator against float64: ours and the plain path, forward and backward.

An error is relative in the 2-norm. Ours may be twice the plain path's, plus one eps of the dtype: the rule by which
`--mindspeed-lite-verify` judges features of the class ulp. But never more than 8 eps, which is what ours may be off
where there is no plain path: on a device that computes nonsense, the plain path's is no measure. The float64
evaluation is the operator's reference on the CPU, since not every device has such numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.bench import operators, timing
from mindspeed_lite.bench.operators import BoundCase, equivalence
from mindspeed_lite.bench.selftest.check import FAILED, FALLBACK, OK, Check, Outcome
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.discovery import OPERATORS, cases

Function = equivalence.Function

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_EPS = 8


def checks(device: str, quick: bool) -> list[Check]:
    """A check for each operator's backend, and one for each problem."""
    found = [Check("numerics", f"{name}, backend", functools.partial(_backend, name, device)) for name in OPERATORS]
    for each in problems(device, quick):
        found.append(Check("numerics", f"{each.operator} {each.name}", functools.partial(judge, each, device)))
    return found


def problems(device: str, quick: bool) -> list[BoundCase]:
    """Every problem; quick: the first shapes, one dtype of each width."""
    found = []
    for name in OPERATORS:
        declared = cases(name)
        for dtype in _DTYPES[: 2 if quick else 3]:
            texts = (declared.numerics or declared.quick)[: 2 if quick else None]
            found += [operators.case(name, text, device, dtype) for text in texts]
            found += operators.variants(name, device, dtype)
        if not quick:
            found += [operators.case(name, text, device, torch.bfloat16) for text in declared.numerics_bf16]
    return found


def judge(problem: BoundCase, device: str) -> Outcome:
    """Whether ours is as near to float64 as it must be, on the device's own backend."""
    inputs = problem.make()
    load_ours, load_plain = (each.load for each in problem.contenders[:2])
    function = load_ours()
    refused = _refusal(problem.operator, device, function, inputs)
    with _on_own_backend(problem.operator, "" if refused else device):
        ours, gradient = _outcome(function, inputs, None)
    try:
        plain, _ = _outcome(load_plain(), inputs, gradient)
        without = ""
    except Exception as error:  # too large, or without a kernel: ours is judged alone
        plain, without = {}, f"; the plain path did not run: {timing.said(error)}"
    wide = [each.detach().cpu().double().requires_grad_(each.requires_grad) for each in inputs]
    with dispatch.force(problem.operator, dispatch.REFERENCE):
        exact, _ = _outcome(function, wide, gradient.cpu().double())
    figures = [_figure(name, ours[name], plain.get(name), exact[name], problem.dtype) for name in exact]
    wrong = [each for each in figures if not _share(each) <= 1]
    text = "; ".join(map(_text, wrong or [max(figures, key=_share)]))
    status = FAILED if wrong else OK
    if refused:
        text += f"; computed by the reference: {refused}"
        # Every problem here is one that the NPU backends are written for.
        status = FAILED if device == "npu" or status == FAILED else FALLBACK
    return Outcome(text + without, status, figures)


def _backend(name: str, device: str) -> Outcome:
    selected = dispatch.selected(name, device)
    if selected.reasons:
        return Outcome(f"the reference, since {'; '.join(selected.reasons)}", FAILED)
    return Outcome(selected.backend)


def _on_own_backend(name: str, device: str) -> contextlib.AbstractContextManager[None]:
    """Force the device's backend where there is one, so that nothing falls back unseen."""
    if device in dispatch.operator(name).backends and not dispatch.operator(name).unusable(device):
        return dispatch.force(name, device)
    return contextlib.nullcontext()


def _refusal(name: str, device: str, function: Function, inputs: Sequence[torch.Tensor]) -> str:
    """Why the device's backend does not take this problem, or nothing."""
    try:
        with _on_own_backend(name, device), torch.no_grad():
            function(*equivalence.own(inputs))
    except RuntimeError as error:
        # The device's own errors are of this type too, and are for the caller.
        if "is forced and cannot serve" not in str(error):
            raise
        return timing.said(error)
    return ""


def _outcome(
    function: Function, inputs: Sequence[torch.Tensor], gradient: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Output and gradients by name, and the gradient that was sent back: `gradient`, or one made for the output."""
    if not any(each.requires_grad for each in inputs):
        return {"output": function(*equivalence.own(inputs))}, torch.empty(0)
    out = function(*inputs)
    sent = equivalence.output_gradient(out) if gradient is None else gradient
    found = torch.autograd.grad(out, inputs, sent)
    named = {f"gradient of input {number}": each for number, each in enumerate(found, 1)}
    return {"output": out.detach(), **named}, sent


def _figure(
    name: str, ours: torch.Tensor, plain: torch.Tensor | None, exact: torch.Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    eps = torch.finfo(dtype).eps
    error = _error(ours, exact)
    other = None if plain is None else _error(plain, exact)
    bound = _MOST_EPS * eps
    if other is not None and math.isfinite(other) and bool(exact.any()):
        bound = min(bound, 2 * other + eps)
    return {"result": name, "ours": error, "plain": other, "bound": bound}


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of `got` relative to `exact`; infinite for a wrong shape and for values that are not finite."""
    wide = got.detach().cpu().double()
    if wide.shape != exact.shape or not bool(wide.isfinite().all()):
        return math.inf
    size = float(exact.norm().item()) or float(max(exact.numel(), 1)) ** 0.5
    return float((wide - exact).norm().item()) / size


def _share(figure: dict[str, Any]) -> float:
    return float(figure["ours"]) / float(figure["bound"])


def _text(figure: dict[str, Any]) -> str:
    plain = "" if figure["plain"] is None else f", plain {figure['plain']:.2g}"
    return f"{figure['result']}: error {figure['ours']:.2g}, bound {figure['bound']:.2g}{plain}"
