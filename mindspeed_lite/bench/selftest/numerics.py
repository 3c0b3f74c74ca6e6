"""Are the numbers right: every operator forward and backward, ours and the plain path, each against float64.

An error is relative in the 2-norm. Ours may be twice the plain path's, plus one eps of the dtype: the rule by which
`--mindspeed-lite-verify` judges features of the class ulp. But never more than 8 eps, which is what ours may be off
where there is no plain path: on a device that computes nonsense, the plain path's is no measure. The float64
evaluation is the operator's reference on the CPU, since not every device has such numbers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_lite.bench import operators, timing
from mindspeed_lite.bench.operators import agreement, attention, dtype_name, rms_norm
from mindspeed_lite.bench.selftest.check import FAILED, FALLBACK, OK, Check, Outcome
from mindspeed_lite.ops import attention as attention_op
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops import rms_norm as rms_norm_op
from mindspeed_lite.ops.attention import packed

Function = agreement.Function

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_EPS = 8

# Shapes as in bench-ops, chosen for the ways through a backend rather than for size: causal, no mask, a window on
# one side and on both, one key head for several heads and for all, lengths that are no power of two. An operator that
# is not here is asked for its own quick shapes.
_SHAPES = {
    "activation": (
        "64x1024",
        "37x1000,kind=geglu",
        "64x1024,kind=gelu,bias=1",
        "129x250,kind=swiglu,bias=1,weights=1",
    ),
    "adamw": ("3x1000", "2x65537"),
    "attention": (
        "s=128,n=4,d=64",
        "s=100,b=2,n=8,g=2,d=80",
        "s=192,n=4,d=64,w=32",
        "s=130,n=4,g=1,d=128,causal=0",
        "s=130,n=2,d=64,w=20,causal=0",
    ),
    "bias_dropout_add": ("64x1024", "37x1000"),
    "layer_norm": ("64x1024", "37x1000", "300x64"),
    # Lengths that NPUs take.
    "masked_softmax": ("1x4x128x128", "2x3x96x160,causal=0", "1x2x32x4096,causal=0"),
    "moe_router": (
        "64x64,k=6,pre=1",
        "100x64,k=8,scores=sigmoid,groups=8/4,bias=1",
        "37x60,k=4,scores=sigmoid",
    ),
    "permute": ("64x1024x8x2", "37x1000x12x1", "300x64x64x6"),
    "rms_norm": ("64x1024", "37x1000", "512x4096", "300x64"),
    "rope": (
        "s=128,n=4,d=64",
        "s=100,b=2,n=3,d=80,r=40",
        "s=96,n=4,d=64,pairs=interleaved",
        "s=96,n=4,d=64,pairs=regrouped",
    ),
    "l2norm": ("3x1000", "2x65537"),
    "grouped_matmul": ("300x64x96x4", "37x100x65x3", "513x136x72x9"),
    "accumulate_wgrad": ("128x64x192", "37x100x65", "1100x130x97"),
}
# Beyond the 2048 x 2048 triangle that stands for every causal mask on an NPU; in one dtype, for it takes a while.
_LONG = {"attention": "s=2304,n=2,d=64"}


@dataclass(frozen=True)
class Problem:
    """What is computed: `ours` and `plain` load functions of what `make` returns."""

    operator: str
    name: str
    dtype: torch.dtype
    make: Callable[[], Sequence[torch.Tensor]]
    ours: Callable[[], Function]
    plain: Callable[[], Function]


def checks(device: str, quick: bool) -> list[Check]:
    """A check for each operator's backend, and one for each problem."""
    found = [Check("numerics", f"{name}, backend", functools.partial(_backend, name, device)) for name in _names()]
    for each in problems(device, quick):
        found.append(Check("numerics", f"{each.operator} {each.name}", functools.partial(judge, each, device)))
    return found


def problems(device: str, quick: bool) -> list[Problem]:
    """Every problem; quick: the first shapes, one dtype of each width."""
    found = []
    for name in filter(operators.OPERATORS.__contains__, _names()):
        file = operators.module(name)
        texts = _SHAPES.get(name) or tuple(file.shapes(device, True))
        for dtype in _DTYPES[: 2 if quick else 3]:
            found += [_of_case(file.case(text, device, dtype)) for text in texts[: 2 if quick else None]]
            if name in _EXTRA:
                found += [extra(device, dtype) for extra in _EXTRA[name]]
        if name in _LONG and not quick:
            found.append(_of_case(file.case(_LONG[name], device, torch.bfloat16)))
    return found


def judge(problem: Problem, device: str) -> Outcome:
    """Whether ours is as near to float64 as it must be, on the device's own backend."""
    inputs = problem.make()
    function = problem.ours()
    refused = _refusal(problem.operator, device, function, inputs)
    with _on_own_backend(problem.operator, "" if refused else device):
        ours, gradient = _outcome(function, inputs, None)
    try:
        plain, _ = _outcome(problem.plain(), inputs, gradient)
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


def _names() -> Sequence[str]:
    return tuple(dispatch.OPERATORS)


def _backend(name: str, device: str) -> Outcome:
    selected = dispatch.selected(name, device)
    if selected.reasons:
        return Outcome(f"the reference, since {'; '.join(selected.reasons)}", FAILED)
    if name not in operators.OPERATORS:
        return Outcome("no file in bench/operators: neither its numbers nor its speed are looked at", FAILED)
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
            function(*agreement.own(inputs))
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
        return {"output": function(*agreement.own(inputs))}, torch.empty(0)
    out = function(*inputs)
    sent = agreement.output_gradient(out) if gradient is None else gradient
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


def _of_case(case: operators.Case) -> Problem:
    ours, plain = case.contenders[:2]
    return Problem(case.operator, case.name, case.dtype, case.make, ours.load, plain.load)


def _masked(device: str, dtype: torch.dtype) -> Problem:
    """attention with a mask of its own for each sequence, True where the key is hidden, on top of the causal order."""
    s, b, n, d = 96, 2, 4, 64
    hidden = torch.rand(b, 1, s, s, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden |= torch.ones(s, s, dtype=torch.bool).triu(1)
    hidden[..., range(s), range(s)] = False  # no row without keys: there the plain path has an answer of its own
    masks: dict[str, torch.Tensor] = {}

    def mask(like: torch.Tensor) -> torch.Tensor:
        return masks.setdefault(like.device.type, hidden.to(like.device))

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n, s, d]
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(mask(q), -10000.0)
        out: torch.Tensor = scores.softmax(-1) @ v
        return out.permute(2, 0, 1, 3).contiguous()

    return Problem(
        "attention",
        f"mask [{b}, 1, {s}, {s}] n={n} d={d} {dtype_name(dtype)}",
        dtype,
        attention.case(f"s={s},b={b},n={n},d={d}", device, dtype).make,
        lambda: lambda q, k, v: attention_op.attention(q, k, v, mask=mask(q)),
        lambda: plain,
    )


def _offset(device: str, dtype: torch.dtype) -> Problem:
    """attention whose softmax has one more logit per head: our own call of a backend's backward."""
    s, b, n, d = 96, 2, 4, 64
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)

    def make() -> Sequence[torch.Tensor]:
        sink = torch.linspace(-2, 2, n).to(device, dtype).requires_grad_()
        return *attention.case(f"s={s},b={b},n={n},d={d}", device, dtype).make(), sink

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n, s, d]
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(hidden.to(q.device), -10000.0)
        logits = torch.cat([scores, sink.reshape(1, n, 1, 1).expand(b, n, s, 1)], -1)
        out: torch.Tensor = logits.softmax(-1)[..., :-1] @ v
        return out.permute(2, 0, 1, 3).contiguous()

    return Problem(
        "attention",
        f"softmax offset s={s} b={b} n={n} d={d} {dtype_name(dtype)}",
        dtype,
        make,
        lambda: lambda q, k, v, sink: attention_op.attention(q, k, v, causal=True, sink=sink),
        lambda: plain,
    )


def _packed(device: str, dtype: torch.dtype) -> Problem:
    """attention over three sequences behind one another."""
    ends, n, d = (0, 40, 45, 128), 4, 64
    packing = packed.Packing.of(ends)
    document = torch.arange(ends[-1]).unsqueeze(-1).ge(torch.tensor(ends[1:])).sum(-1)
    hidden = (document.unsqueeze(-1) != document) | torch.ones(ends[-1], ends[-1], dtype=torch.bool).triu(1)

    def make() -> Sequence[torch.Tensor]:
        batched = attention.case(f"s={ends[-1]},n={n},d={d}", device, dtype).make()
        return [t.detach().squeeze(1).requires_grad_() for t in batched]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [n, s, d]
        scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(hidden.to(q.device), -10000.0)
        out: torch.Tensor = (scores.softmax(-1) @ v).transpose(0, 1)
        return out.contiguous()

    return Problem(
        "attention",
        f"pack of {ends[-1]} n={n} d={d} {dtype_name(dtype)}",
        dtype,
        make,
        lambda: lambda q, k, v: packed.attention(q, k, v, packing, causal=True),
        lambda: plain,
    )


def _zero_centred(device: str, dtype: torch.dtype) -> Problem:
    """rms_norm whose weight stands for 1 + weight."""

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), 1 + weight, rms_norm.EPS)

    def make() -> Sequence[torch.Tensor]:
        x, weight = rms_norm.case("64x1024", device, dtype).make()
        return x, (weight.detach() - 1).requires_grad_()

    return Problem(
        "rms_norm",
        f"64x1024 1 + weight {dtype_name(dtype)}",
        dtype,
        make,
        lambda: lambda x, weight: rms_norm_op.rms_norm(x, weight, rms_norm.EPS, True),
        lambda: plain,
    )


_EXTRA: dict[str, Sequence[Callable[[str, torch.dtype], Problem]]] = {
    "attention": (_masked, _offset, _packed),
    "rms_norm": (_zero_centred,),
}
