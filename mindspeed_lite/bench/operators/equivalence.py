"""Compares implementations by relative 2-norm error of output and gradients before timing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mindspeed_lite.ops.case import Function

# Several roundings of the dtype, as in a softmax backward; wrong formulas are far off.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3, torch.float64: 1e-6}

DISAGREES = "does not agree with ours"


def outcome(
    function: Function, inputs: Sequence[torch.Tensor], gradient: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Outputs without and with gradients, and the gradients of inputs.

    gradient: of the output; default: `output_gradient`.
    """
    with torch.no_grad():
        inference = function(*own(inputs))
    wanted = {f"gradient of input {place}": each for place, each in enumerate(inputs, 1) if each.requires_grad}
    if not wanted:
        return {"output": inference}
    out = function(*own(inputs))
    found = {"output without gradients": inference, "output": out.detach()}
    if out.requires_grad:
        gradient = output_gradient(out) if gradient is None else gradient
        gradients = torch.autograd.grad(out, [*wanted.values()], gradient, allow_unused=True)
        found |= {name: each for name, each in zip(wanted, gradients, strict=True) if each is not None}
    return found


def own(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs, with copies of those without gradients, which operators may overwrite."""
    return [each if each.requires_grad else each.clone() for each in inputs]


def output_gradient(out: torch.Tensor) -> torch.Tensor:
    # On a GPU: large ones take the host seconds.
    device = out.device if out.device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(out.shape, generator=generator, device=device).to(out.device, out.dtype)


def disagreement(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], dtype: torch.dtype) -> str | None:
    allowed = _TOLERANCE[dtype]
    found = []
    for name, want in ours.items():
        got = theirs.get(name)
        if got is None:
            found.append(f"{name} is missing")
        elif got.shape != want.shape or got.dtype != want.dtype:
            found.append(f"{name} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}")
        elif not (distance := relative_error(got, want)) <= allowed:
            found.append(f"{name} differs by {distance:.2g}, allowed {allowed:.2g}")
    return None if not found else f"{DISAGREES}: {'; '.join(found)}"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in the 2-norm; the root mean square of `got` where `want` is zero."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return math.inf
    wide = torch.promote_types(want.dtype, torch.float32)
    norm = float(torch.linalg.vector_norm(want, dtype=wide).item()) or max(want.numel(), 1) ** 0.5
    return float(torch.linalg.vector_norm(got.to(wide) - want.to(wide)).item()) / norm
