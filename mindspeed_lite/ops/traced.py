"""Whether a kernel that is handed addresses may be called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Fake tensors, and other tensor subclasses, may have no memory.
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)
_plain: list[None] = []


def is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler looks on, or `x` has no memory that an address or a number could be read from."""
    return bool(_plain) or torch.compiler.is_compiling() or type(x) not in _WITH_MEMORY


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Kernels count as traced in the block, on every thread: a dispatch mode changes what torch's operators compute."""
    _plain.append(None)
    try:
        yield
    finally:
        _plain.pop()
