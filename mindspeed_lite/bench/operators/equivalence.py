"""Rejects an implementation whose output differs before timing it.

Every contender rounds in its own places, so what counts is the relative distance in the 2-norm, for the output and
for each gradient. A contender that disagrees gets no time; which of the two is wrong is for the reader to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Several roundings of the dtype each, as plain PyTorch makes them in the backward of a softmax; an error of the
# formula is far beyond.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3, torch.float64: 1e-6}

Function = Callable[..., torch.Tensor]

DISAGREES = "does not agree with ours"


def outcome(function: Function, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything a call gives: its output with and without gradients, and each input's gradient, if it has any."""
    with torch.no_grad():
        alone = function(*own(inputs))
    if not any(each.requires_grad for each in inputs):
        return {"output": alone}
    out = function(*inputs)
    gradients = torch.autograd.grad(out, inputs, output_gradient(out))
    found = {"output without gradients": alone, "output": out.detach()}
    return found | {f"gradient of input {number}": each for number, each in enumerate(gradients, 1)}


def own(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, copies in place of those without a gradient: an operator may write them."""
    return [each if each.requires_grad else each.clone() for each in inputs]


def output_gradient(out: torch.Tensor) -> torch.Tensor:
    """The gradient to send back through `out`: random, the same for all contenders."""
    # On a GPU by the GPU: a large one takes the host seconds.
    device = out.device if out.device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(out.shape, generator=generator, device=device).to(out.device, out.dtype)


def disagreement(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], dtype: torch.dtype) -> str | None:
    """Where the two outcomes differ by more than rounding, or None."""
    allowed = _TOLERANCE[dtype]
    found = []
    for name, want in ours.items():
        got = theirs[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            found.append(f"{name} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}")
            continue
        distance = _distance(got, want)
        if not distance <= allowed:  # a NaN is no agreement
            found.append(f"{name} differs by {distance:.2g}, allowed {allowed:.2g}")
    return None if not found else f"{DISAGREES}: {'; '.join(found)}"


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    wide = torch.float64 if want.dtype == torch.float64 else torch.float32
    norm = float(torch.linalg.vector_norm(want, dtype=wide).item())
    distance = float(torch.linalg.vector_norm(got.to(wide) - want.to(wide)).item())
    return distance / norm if norm else distance
