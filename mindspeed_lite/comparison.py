"""Compares an operator with the original on one call: output and gradients.

Errors are relative 2-norms, summed in float64. Bounds: bitwise: 0. ulp: twice the original's rounding error plus one
eps of the coarsest dtype (plus 8 in float32, where a GPU's exponential alone is off by 2), or 8 eps. deviation: none,
but finite. The original's error is its distance from itself in float64, or float32 if all inputs have 16 bits.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mindspeed_lite.ops.traced import plain_torch

EPS_WITHOUT_TRUTH = 8

Function = Callable[..., torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Finding(NamedTuple):
    name: str
    apart: float | None = None
    error: float | None = None
    bound: float | None = None
    measured_from: str = "original"
    problem: str = ""

    @property
    def share(self) -> float:
        if self.problem or (self.error is not None and self.error != self.error):
            return float("inf")
        if self.error is None or self.bound is None:
            return 0.0
        return self.error / self.bound if self.bound else (float("inf") if self.error else 0.0)


def compare(
    numerics: str,
    ours: Function,
    original: Function,
    inputs: Mapping[str, torch.Tensor],
    widened: bool,
    seed: int,
    wide: torch.dtype | None = None,
) -> tuple[list[Finding], str]:
    """Findings for output and gradients, and why the original was not widened.

    wide: type of the truth; default: float64, or float32 if all inputs have 16 bits.
    """
    tensors = tuple(inputs.values())
    # Without grad mode, as in a recomputed layer's first pass, every input gets a gradient.
    wanted = [t.is_floating_point() and (not torch.is_grad_enabled() or t.requires_grad) for t in tensors]
    # Outer checkpoint or offload hooks must not see these tensors.
    with (
        _restored_randomness(tensors[0].device) as restore,
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        leaves = _copies(tensors, wanted)
        output = ours(*leaves)
        generator = torch.Generator(output.device).manual_seed(seed)
        dout = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        here = [output.detach(), *_gradients(output, leaves, dout)]
        restore()
        leaves = _copies(tensors, wanted)
        output = original(*leaves)
        if output.shape != dout.shape:
            problem = f"output has shape {tuple(dout.shape)}, the original's has {tuple(output.shape)}"
            return [Finding("output", problem=problem)], ""
        there = [output.detach(), *_gradients(output, leaves, dout)]
        del output, leaves
        pairs = [_pair(a, b) for a, b in zip(here, there, strict=True)]
        why_not = ""
        truth: list[torch.Tensor | None] = [None] * len(pairs)
        has_32_bits = any(t.dtype in (torch.float32, torch.float64) for t in tensors)
        wide = wide or (torch.float64 if has_32_bits else torch.float32)
        if numerics == "ulp" and widened:
            restore()
            try:
                truth = _widened(original, tensors, wanted, dout, wide)
            except Exception as error:
                why_not = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    eps = max((torch.finfo(t.dtype).eps for t in (dout, *tensors) if t.is_floating_point()), default=0.0)
    names = ("output", *(f"gradient of {name}" for name in inputs))
    rows = zip(names, pairs, truth, strict=True)
    return [_judge(name, numerics, pair, eps, true, wide) for name, pair, true in rows if pair], why_not


@contextlib.contextmanager
def _restored_randomness(device: torch.device) -> Iterator[Callable[[], None]]:
    # The device layer may redirect torch's functions to the device's state.
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
    """Leaves with equal values and strides, on which kernels depend."""
    copies = []
    for tensor, wants in zip(tensors, wanted, strict=True):
        tensor = tensor.detach()
        if 0 in tensor.stride():  # expanded tensors cannot be written elementwise
            copy = tensor.clone()
        else:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            copy.copy_(tensor)
        copies.append(copy.requires_grad_(wants))
    return copies


def _gradients(output: torch.Tensor, leaves: Sequence[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not output.requires_grad:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(output, wanted, dout.to(output.dtype), allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _pair(a: torch.Tensor | None, b: torch.Tensor | None) -> Pair | None:
    if a is None:
        return None if b is None else (torch.zeros_like(b), b)
    return a, torch.zeros_like(a) if b is None else b


def _widened(
    original: Function, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], dout: torch.Tensor, wide: torch.dtype
) -> list[torch.Tensor | None]:
    mode = _Wider(wide)
    leaves = [mode.widen(t.detach()).clone().requires_grad_(wants) for t, wants in zip(tensors, wanted, strict=True)]
    eager = torch.compiler.set_stance("force_eager")
    with torch.autocast(leaves[0].device.type, enabled=False), eager, plain_torch(), mode:
        output = original(*leaves)
        if output.dtype != wide:
            raise TypeError(f"its output is {str(output.dtype).removeprefix('torch.')}")
        return [output.detach(), *_gradients(output, leaves, mode.widen(dout))]


class _Wider(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wide = wide

    def widen(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given.to(device=self.widen(given.device), dtype=self.widen(given.dtype))
        if isinstance(given, torch.device) and self.wide == torch.float64 and given.type not in ("cpu", "cuda", "meta"):
            return torch.device("cpu")
        if isinstance(given, torch.dtype) and given.is_floating_point:
            return self.wide if torch.finfo(given).eps > torch.finfo(self.wide).eps else given
        return given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A written tensor stays the caller's own.
        schema = {
            each.name: each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments
        }

        def widen(name: str, given: Any) -> Any:
            return given if schema.get(name) else tree_map(self.widen, given)

        args = [widen(name, each) for name, each in zip(schema, args, strict=False)]
        return func(*args, **{name: widen(name, each) for name, each in (kwargs or {}).items()})


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()).to(torch.float64)


def _finite(pair: Pair) -> Pair:
    a, b = (_in_float64(each) for each in pair)
    finite = a.isfinite() & b.isfinite()
    return a.where(finite, 0.0), b.where(finite, 0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of a from b; the root mean square of a if b is zero."""
    size = float(b.norm()) or float(max(b.numel(), 1)) ** 0.5
    return float((a - b).norm()) / size


def _judge(name: str, numerics: str, pair: Pair, eps: float, truth: torch.Tensor | None, wide: torch.dtype) -> Finding:
    a, b = pair
    is_lost = bool((~a.isfinite() & b.isfinite()).any())
    problem = f"{name} is not finite where the original's is" if is_lost else ""
    apart = _distance(*_finite(pair))
    if numerics == "bitwise":
        # By value, NaN equal to NaN: a difference may underflow in the norm.
        same = a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        return Finding(name, apart, 0.0 if same else max(apart, sys.float_info.min), 0.0, problem=problem)
    if numerics == "deviation":
        return Finding(name, apart, measured_from="", problem=problem)
    if truth is None:
        return Finding(name, apart, apart, EPS_WITHOUT_TRUTH * eps, problem=problem)
    truth = _in_float64(truth)
    error, own = (_distance(each, truth) for each in _finite(pair))
    # A gradient that cancels to zero is rounding of terms of order one.
    is_narrow = eps > torch.finfo(torch.float32).eps
    slack = eps if is_narrow and bool(truth.any()) else EPS_WITHOUT_TRUTH * eps
    return Finding(name, apart, error, 2 * own + slack, str(wide).removeprefix("torch."), problem)
