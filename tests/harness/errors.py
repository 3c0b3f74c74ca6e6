"""An error measure that a wrong result does not pass: relative to float64 in the 2-norm, for one tensor at a time.

The bound follows from the dtype that a result is rounded to and from the length of its sums, not from what an
implementation happens to reach. `mutations` makes the wrong results that a bound must reject.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Fractions of a tensor's longest dimension that a kernel's missing block takes.
_BLOCK = 8


def error(got: torch.Tensor, exact: torch.Tensor, magnitude: float | None = None) -> float:
    """||got - exact|| / max(||exact||, magnitude); infinite for another shape.

    magnitude: the norm of the terms whose difference the result is, where they cancel.
    """
    if got.shape != exact.shape:
        return math.inf
    size = max(exact.double().norm().item(), magnitude or 0.0)
    return (got.double() - exact.double()).norm().item() / (size or 1.0)


def bound(dtype: torch.dtype, terms: int = 1, roundings: int = 1, accumulate: torch.dtype = torch.float32) -> float:
    """The relative error that roundings explain.

    Args:
        dtype: what the result is rounded to; each of `roundings` is off by at most half an eps of it.
        terms: length of the longest sum, in `accumulate` (float64 where `dtype` is); its roundings are independent.
        roundings: how many follow one another; independent ones add up as their root.
    """
    wide = torch.float64 if dtype == torch.float64 else accumulate
    return torch.finfo(dtype).eps / 2 * math.sqrt(roundings) + torch.finfo(wide).eps * (4 + math.sqrt(terms))


def is_within(got: torch.Tensor, exact: torch.Tensor, allowed: float, magnitude: float | None = None) -> bool:
    """Whether the error of `got` is at most `allowed`; a NaN is not.

    Numbers below the normal range of the result's dtype are as exact as its smallest number.
    """
    smallest = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
    size = max(exact.double().norm().item(), magnitude or 0.0) or 1.0
    return error(got, exact, magnitude) <= allowed + smallest * math.sqrt(max(got.numel(), 1)) / size


def assert_within(
    got: torch.Tensor, exact: torch.Tensor, allowed: float, magnitude: float | None = None, name: str = "result"
) -> None:
    """Fail unless `got` is as near to `exact` as `allowed` (see `bound`) says."""
    assert is_within(got, exact, allowed, magnitude), (
        f"{name}: error {error(got, exact, magnitude):.3g}, allowed {allowed:.3g}"
    )


def mutations(result: torch.Tensor, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong forms of a right result, by name: none that is the same as the result."""
    found = {"zeroed": torch.zeros_like(result), "sign flipped": -result}
    if result.dim() >= 2:
        found["transposed"] = result.transpose(-1, -2).reshape(result.shape)
    if result.numel() >= 2 * _BLOCK:  # a single number may be near zero
        found["one block missing"] = _without_block(result, generator)
    found["1 % too large"] = (result.double() * 1.01).to(result.dtype)
    found["1 % too small"] = (result.double() * 0.99).to(result.dtype)
    yield from ((name, wrong) for name, wrong in found.items() if not torch.equal(wrong, result))


def _without_block(result: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`result` with zeros in some neighbouring rows or columns."""
    wrong = result.clone()
    dimensions = [dimension for dimension, length in enumerate(result.shape) if length > 1]
    dimension = dimensions[int(torch.randint(len(dimensions), (1,), generator=generator))]
    length = result.shape[dimension]
    size = max(1, length // _BLOCK)
    first = int(torch.randint(length - size + 1, (1,), generator=generator))
    wrong.narrow(dimension, first, size).zero_()
    return wrong
