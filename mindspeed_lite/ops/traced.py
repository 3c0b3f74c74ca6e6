"""Whether a kernel that is handed addresses may be called, and which addresses it is handed."""

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


class NoMemoryError(RuntimeError):
    """A kernel was to be handed a tensor that has no memory."""


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first value.

    Raises:
        NoMemoryError: there is none, as where memory was released and is to be filled again.
    """
    return with_memory(tensor, tensor.data_ptr())


def with_memory(tensor: torch.Tensor, found: int) -> int:
    """`found`, the address of a tensor, unless its storage has none. Raises NoMemoryError."""
    if found == tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise NoMemoryError(
            f"a kernel was given a tensor of shape {[*tensor.shape]} whose memory is released and not filled: two "
            "mechanisms recompute the same layer, such as torch.utils.checkpoint around one that releases its "
            "activations: turn one of them off"
        )
    return found
