"""Runs the original beside a replaced operator in its first calls, forward and backward, and judges the distance.

A patch hands over both functions and the tensors they take; everything happens on copies of these, with a synthetic
output gradient and with the random states put back, so that a training run keeps its bits. An error is relative in
the 2-norm over the whole tensor, summed in float64. What is allowed depends on the feature's numerics:

bitwise     nothing: every value must be equal
ulp         twice the original's own rounding error, plus one eps of the coarsest dtype involved; where that error
            cannot be measured, 8 eps between the two
deviation   anything finite; the figures are recorded

A value that is not finite where the original's is counts as exceeding in every class.

The original's rounding error is its distance from itself in a wider type: its own code runs once more, with each of its
tensors in float64, or in float32 where all inputs have 16 bits. Nothing of how a patch has read the call enters.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mindspeed_lite.engine import EngineError, Session, Verification, VerifyError
from mindspeed_lite.ops.traced import plain_torch

FLAG = "--mindspeed-lite-verify"

# Without a wider evaluation: room for two roundings of each result and for sums in another order.
_EPS_APART = 8

_log = logging.getLogger("mindspeed_lite")
# An operator that is called inside a comparison (another session's, one built on another) is part of it.
_inside = threading.local()

Function = Callable[..., torch.Tensor]


class Part(NamedTuple):
    """The original on a part of a call, for evaluation in a wider type where the whole is too large.

    A part is closed: what `original` returns depends on nothing but the parts of the inputs, and these parts have
    no influence elsewhere. `output` and `inputs` are the subscripts of the parts.
    """

    original: Function
    output: Any = ...
    inputs: Sequence[Any] | None = None


class _Finding(NamedTuple):
    """One result of one call: how far it is from the original's, and what was held against which bound."""

    name: str
    apart: float | None
    error: float | None
    bound: float | None
    measured_from: str
    problem: str

    @property
    def exceeds(self) -> bool:
        return bool(self.problem) or (
            self.error is not None and self.bound is not None and not self.error <= self.bound
        )

    @property
    def share(self) -> float:
        """The part of the bound that is used up."""
        if self.problem:
            return float("inf")
        if self.error is None or self.bound is None:
            return self.apart or 0.0
        return self.error / self.bound if self.bound else (float("inf") if self.error else 0.0)


class Verifier:
    """Compares the first `calls` calls of each kind in one session; `listeners` hear of each kind that is done."""

    def __init__(self, calls: int, session: Session) -> None:
        self.calls = calls
        self.listeners: list[Callable[[Verification], None]] = []
        self._session = session
        self._seen: dict[Any, int] = {}
        self._entries: dict[Any, Verification] = {}
        self._shares: dict[Any, float] = {}
        self._said: set[Any] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        # A copy of a model, or one read from a file, belongs to no session and is not verified.
        return type(None), ()

    @property
    def is_comparing(self) -> bool:
        """Whether this thread is in the middle of a comparison."""
        return getattr(_inside, "active", False)

    def leave_out(self, feature: str, operator: str, reason: str) -> None:
        """Say once why calls of an operator are not compared."""
        self._say(f"{FLAG}: {operator} of `{feature}` is not compared: {reason}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._session.notice(text)
            _log.warning("%s", text)

    def check(
        self,
        feature: str,
        operator: str,
        numerics: str,
        ours: Function,
        original: Function,
        inputs: Mapping[str, torch.Tensor],
        *,
        against: str,
        parts: Sequence[Part] = (),
        widened: bool = True,
        variant: str = "",
        sizes_vary: bool = False,
    ) -> None:
        """Compare `ours` with `original`, both functions of the tensors of `inputs`, if this call is among the first.

        Args:
            feature: name of the feature that replaced the operator.
            operator: name of the operator.
            numerics: the feature's class.
            ours: what replaces, from the inputs in their order to one tensor.
            original: what is replaced, in the same shape.
            inputs: activations and parameters by name. With gradients enabled those that want one get one; with
                gradients disabled all do, since the first pass of a recomputed layer would use up the calls.
            against: what `original` is, for the report.
            parts: what the original is evaluated on in a wider type, instead of the whole: the one where both differ
                most.
            widened: whether it is at all. Not where rounding decides what is computed, nor where there is no room.
            variant: what sets calls of the same shapes apart.
            sizes_vary: calls are the same whatever the first dimension of their inputs, which each batch decides.

        Raises:
            VerifyError: strict, and an error is above its bound or the two could not be run.
        """
        if torch.compiler.is_compiling() or self.is_comparing or _cannot_run(inputs):
            return
        first = 1 if sizes_vary else 0
        key = (feature, operator, variant, tuple((t.shape[first:], t.dtype) for t in inputs.values()))
        with self._lock:
            number = self._seen.get(key, 0)
            if number >= self.calls:
                return
            self._seen[key] = number + 1
        _inside.active = True
        try:
            findings, unwidened = _compare(numerics, ours, original, inputs, parts, widened, number)
        except EngineError:
            raise
        except Exception as error:
            # An observer must not end a run that would go on without it: the original may not fit in memory.
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            if self._session.strict:
                raise VerifyError(f"{FLAG}: {operator} of `{feature}` cannot be compared: {reason}") from error
            self.leave_out(feature, operator, reason)
            return
        finally:
            _inside.active = False
        if unwidened:
            self._say(
                f"{FLAG}: the original of `{feature}`'s {operator} does not run in a wider type ({unwidened}); the "
                f"bound is {_EPS_APART} eps between the two"
            )
        entry = Verification(feature, operator, _shape_text(inputs, variant), numerics, against)
        self._record(key, entry, findings, last=number + 1 == self.calls)

    def _record(self, key: Any, new: Verification, findings: list[_Finding], last: bool) -> None:
        worst = max(findings, key=lambda each: each.share)
        with self._lock:
            entry = self._entries.setdefault(key, new)
            if entry is new:
                self._session.report.verifications.append(entry)
            entry.calls += 1
            for each in findings:
                field = "output_error" if each is findings[0] else "gradient_error"
                if each.apart is not None:
                    setattr(entry, field, max(each.apart, getattr(entry, field) or 0.0))
            if key not in self._shares or worst.share > self._shares[key]:
                self._shares[key] = worst.share
                entry.worst, entry.error, entry.bound = worst.name, worst.error, worst.bound
                entry.measured_from, entry.problem = worst.measured_from, worst.problem
            exceeds = worst.exceeds
            is_new = exceeds and entry.verdict == "ok"
            if exceeds:
                entry.verdict = "exceeds"
        if is_new:
            _log.warning("%s: %s", FLAG, entry.to_text())
        elif last and entry.verdict == "ok":
            # A host may show INFO on every rank; that all is well is for a listener to say, on one.
            _log.debug("%s: %s", FLAG, entry.to_text())
        stops = exceeds and self._session.strict
        if last or stops:
            for listener in tuple(self.listeners):
                listener(entry)
        if stops:
            raise VerifyError(_refusal(entry))


def _refusal(entry: Verification) -> str:
    found = entry.problem
    if not found:
        rule = f"twice the original's own distance from {entry.measured_from}, plus one eps"
        if entry.measured_from == "original":
            rule = "no difference at all" if entry.numerics == "bitwise" else f"{_EPS_APART} eps"
        found = (
            f"{entry.worst} has a relative error of {entry.error:.3g} against {entry.measured_from}; "
            f"the bound is {entry.bound:.3g} ({rule})"
        )
    flag = f"--{entry.feature.replace('_', '-')}"
    return (
        f"{FLAG}: feature `{entry.feature}` ({flag}), operator {entry.operator} on {entry.shape}: {found}. "
        f"Run without {flag} and report this line; without --mindspeed-lite-strict it is a warning and the run goes on."
    )


def _cannot_run(inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether these tensors have no values, or are being recorded instead of computed."""
    kinds = {t.device.type for t in inputs.values()}
    return "meta" in kinds or ("cuda" in kinds and torch.cuda.is_current_stream_capturing())


def _shape_text(inputs: Mapping[str, torch.Tensor], variant: str) -> str:
    dtypes = {str(t.dtype).removeprefix("torch.") for t in inputs.values()}
    one = len(dtypes) == 1
    tensors = [
        f"{name}[{','.join(map(str, t.shape))}]" + ("" if one else f":{str(t.dtype).removeprefix('torch.')}")
        for name, t in inputs.items()
    ]
    return " ".join(filter(None, (*(dtypes if one else ()), *tensors, variant)))


def _compare(
    numerics: str,
    ours: Function,
    original: Function,
    inputs: Mapping[str, torch.Tensor],
    parts: Sequence[Part],
    widened: bool,
    number: int,
) -> tuple[list[_Finding], str]:
    """The findings for the output and the gradient of each input that has one; why the original was not widened."""
    tensors = tuple(inputs.values())
    everything = not torch.is_grad_enabled()
    wanted = [t.is_floating_point() and (everything or t.requires_grad) for t in tensors]
    # What is saved for backward here must not reach the hooks of an outer checkpoint, which counts, or offloader.
    with (
        _unchanged_randomness(tensors[0].device) as restore,
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        leaves = _copies(tensors, wanted)
        output = ours(*leaves)
        dout = _output_gradient(output, number)
        here = [output.detach(), *_gradients(output, leaves, dout)]
        restore()
        leaves = _copies(tensors, wanted)
        output = original(*leaves)
        if output.shape != dout.shape:
            problem = f"output has shape {tuple(dout.shape)}, the original's has {tuple(output.shape)}"
            return [_Finding("output", None, None, None, "original", problem)], ""
        there = [output.detach(), *_gradients(output, leaves, dout)]
        del output, leaves
        names = ("output", *(f"gradient of {name}" for name in inputs))
        # Where only one of the two says that an input has no influence, it says that its gradient is zero.
        pairs = [
            None if a is None and b is None else (_or_zero(a, b), _or_zero(b, a))
            for a, b in zip(here, there, strict=True)
        ]
        part, truth, why_not = Part(original), None, ""
        wide = torch.float64 if any(t.dtype in (torch.float32, torch.float64) for t in tensors) else torch.float32
        if numerics == "ulp" and widened:
            part = _where_they_differ_most(parts, pairs) if parts else part
            restore()
            try:
                truth = _widened(part, tensors, wanted, dout, wide)
            except Exception as error:
                why_not = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    eps = max((torch.finfo(t.dtype).eps for t in (dout, *tensors) if t.is_floating_point()), default=0.0)
    findings = [
        _judge(name, numerics, pair, eps, place, None if truth is None else truth[index], wide)
        for index, (name, pair, place) in enumerate(zip(names, pairs, _places(part, tensors), strict=True))
        if pair is not None
    ]
    return findings, why_not


def _places(part: Part, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Subscripts of a part's output and inputs."""
    return [part.output, *(part.inputs or [...] * len(tensors))]


@contextlib.contextmanager
def _unchanged_randomness(device: torch.device) -> Iterator[Callable[[], None]]:
    """What is drawn in the block leaves no trace: yields how to go back to its start, and does so at its end."""
    # The second asks what the device layer answers, where the host's stream is kept apart from the device's.
    states: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.default_generator.set_state, (torch.default_generator.get_state(),)),
        (torch.set_rng_state, (torch.get_rng_state(),)),
    ]
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states.append((module.set_rng_state, (module.get_rng_state(device), device)))

    def restore() -> None:
        for put, state in states:
            put(*state)

    try:
        yield restore
    finally:
        restore()


def _copies(tensors: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor]:
    """Leaves with these values and, since kernels choose by them, these strides."""
    copies = []
    for tensor, wants in zip(tensors, wanted, strict=True):
        tensor = tensor.detach()
        if 0 in tensor.stride():  # expanded: elements share memory, which cannot be written one by one
            copy = tensor.clone()
        else:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            copy.copy_(tensor)
        copies.append(copy.requires_grad_(wants))
    return copies


def _output_gradient(output: torch.Tensor, number: int) -> torch.Tensor:
    # A generator of its own; the number of the call, so that no two calls test the same one.
    generator = torch.Generator(output.device).manual_seed(number)
    return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)


def _gradients(output: torch.Tensor, leaves: Sequence[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not output.requires_grad:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(output, wanted, dout.to(output.dtype), allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _or_zero(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient
    assert like is not None
    return torch.zeros_like(like)


def _widened(
    part: Part, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], dout: torch.Tensor, wide: torch.dtype
) -> list[torch.Tensor | None]:
    """The output and gradients of the original with every tensor in `wide`.

    Raises:
        Exception: it does not run so, or rounds on its way in a kernel of its own.
    """
    mode, places = _Wider(wide), _places(part, tensors)
    leaves = [
        mode.of(t.detach()[place]).clone().requires_grad_(wants)
        for t, wants, place in zip(tensors, wanted, places[1:], strict=True)
    ]
    # A compiled function has the narrow types in its code.
    eager = torch.compiler.set_stance("force_eager")
    with torch.autocast(leaves[0].device.type, enabled=False), eager, plain_torch(), mode:
        output = part.original(*leaves)
        if output.dtype != wide:
            raise TypeError(f"its output is {str(output.dtype).removeprefix('torch.')}")
        return [output.detach(), *_gradients(output, leaves, mode.of(dout[places[0]]))]


class _Wider(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators see and make no floating-point tensor narrower than `wide`, whatever the code says.

    On the host where the device has no float64.
    """

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide = wide

    def of(self, given: Any) -> Any:
        """An argument of an operator, widened if it is a tensor or a dtype."""
        if isinstance(given, torch.Tensor):
            to_host = self.wide == torch.float64 and given.device.type not in ("cpu", "cuda", "meta")
            dtype = self.of(given.dtype)
            return given.to(device="cpu" if to_host else None, dtype=dtype)
        if isinstance(given, torch.device) and self.wide == torch.float64 and given.type not in ("cpu", "cuda", "meta"):
            return torch.device("cpu")
        if isinstance(given, torch.dtype) and given.is_floating_point:
            return self.wide if torch.finfo(given).eps > torch.finfo(self.wide).eps else given
        return given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = {each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write}
        names = [each.name for each in func._schema.arguments]

        def of(name: str, given: Any) -> Any:
            # What is written must stay the caller's own tensor.
            return given if name in written else tree_map(self.of, given)

        given = [of(name, each) for name, each in zip(names, args, strict=False)]
        return func(*given, **{name: of(name, each) for name, each in (kwargs or {}).items()})


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


Pair = tuple[torch.Tensor, torch.Tensor]


def _where_they_differ_most(parts: Sequence[Part], pairs: Sequence[Pair | None]) -> Part:
    if len(parts) == 1:
        return parts[0]

    def apart(part: Part) -> float:
        places = [part.output, *(part.inputs or [...] * (len(pairs) - 1))]
        return max(_distance(*_finite(pair, place)) for pair, place in zip(pairs, places, strict=True) if pair)

    return max(parts, key=apart)


def _finite(pair: Pair, place: Any = ...) -> Pair:
    """Ours and the original's in float64, both zero where one of the two is not finite."""
    a, b = (_in_float64(each[place]) for each in pair)
    finite = a.isfinite() & b.isfinite()
    return (a, b) if bool(finite.all()) else (a.where(finite, 0.0), b.where(finite, 0.0))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of a from b, relative to b; where b is zero throughout, the root mean square of a."""
    size = float(b.norm()) or float(max(b.numel(), 1)) ** 0.5
    return float((a - b).norm()) / size


def _judge(
    name: str, numerics: str, pair: Pair, eps: float, place: Any, truth: torch.Tensor | None, wide: torch.dtype
) -> _Finding:
    a, b = pair
    problem = ""
    if bool((~a.isfinite() & b.isfinite()).any()):
        problem = f"{name} is not finite where the original's is"
    apart = _distance(*_finite(pair))
    if numerics == "bitwise":
        # By value, NaN equal to NaN. A difference too small for the norm is one all the same.
        same = a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        return _Finding(name, apart, 0.0 if same else max(apart, sys.float_info.min), 0.0, "original", problem)
    if numerics == "deviation":
        return _Finding(name, apart, None, None, "", problem)
    if truth is None:
        return _Finding(name, apart, apart, _EPS_APART * eps, "original", problem)
    truth = _in_float64(truth)
    nearer, other = (_distance(each, truth) for each in _finite(pair, place))
    # A gradient that is zero by cancellation has no scale: what is left of it is rounding of terms of order one.
    slack = eps if bool(truth.any()) else _EPS_APART * eps
    return _Finding(name, apart, nearer, 2 * other + slack, str(wide).removeprefix("torch."), problem)
