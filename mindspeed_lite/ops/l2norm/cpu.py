"""l2norm on CPU with Megatron's bits: PyTorch's norm of each tensor, several tensors at a time.

PyTorch gives a tensor to one core, which adds up one chain of sums and waits for each. A compiled kernel (`cpu.cpp`)
follows the same order in several tensors side by side and on all cores. Which order PyTorch has depends on its build
and the processor: the first call compares, and where no known order gives its bits, PyTorch is asked itself, in one
call for the whole list. So it is for other dtypes and strides, and without a compiler.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.l2norm import reference
from mindspeed_lite.ops.traced import is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.l2norm import Case

# Square and sum are PyTorch's, rounded together or not as the source says.
_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"), {"l2norms": "pppliiii"}, flags=("-ffp-contract=off",), returns_status=True
)


class _Order(NamedTuple):
    """How PyTorch adds up squares: numbers in a vector, and where a square is added without rounding it."""

    lanes: int
    fused: bool
    fused_rest: bool


def supported(case: Case) -> list[str]:
    return []


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    served = all(each.dtype is torch.float32 and each.is_contiguous() and not is_traced(each) for each in tensors)
    order = _order(torch.backends.cpu.get_cpu_capability()) if served and not torch.compiler.is_compiling() else None
    if order is None:
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=reference.dtype_of(tensors)))
    else:
        norms = _norms(tensors, order)
    norm: torch.Tensor = torch.linalg.vector_norm(norms)
    return norm


def _norms(tensors: Sequence[torch.Tensor], order: _Order) -> torch.Tensor:
    """The norm of every tensor."""
    norms = torch.empty(len(tensors), dtype=torch.float32)
    sizes = [each.numel() for each in tensors]
    _lib.l2norms(
        tensors,
        native.numbers(sizes),
        norms,
        len(tensors),
        *order,
        native.threads(sum(sizes)),
    )
    return norms


@functools.cache
def _order(capability: str) -> _Order | None:
    """PyTorch's order on a processor that it has these kernels for, or None where none of ours has its bits."""
    if _lib.unusable() is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    # Orders differ in most sums of this length; a last vector that is not full is a case of its own.
    samples = [torch.randn(size, generator=generator) for size in (*range(1, 200), *range(4000, 4040), 100_003)]
    expected = torch.stack([torch.linalg.vector_norm(each) for each in samples])
    orders = itertools.starmap(_Order, itertools.product((8, 16, 4), (False, True), (True, False)))
    return next((order for order in orders if torch.equal(_norms(samples, order), expected)), None)
