"""Checks of tensors before kernels get their addresses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Subclasses such as FakeTensor may have no memory.
_WITH_MEMORY = (Tensor, torch.nn.Parameter)
_plain: list[None] = []
# True in a dry run: kernels allocate what they return and save, and compute nothing.
dry = False
# In a dry run: called in place of kernels, as observer(kernel, *given, **options).
observer: Callable[..., Any] | None = None


def observed(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator that reports the calls of a kernel to `observer`."""

    @functools.wraps(kernel)
    def call(*given: _P.args, **options: _P.kwargs) -> _R:
        if observer is None:
            return kernel(*given, **options)
        found: _R = observer(kernel, *given, **options)
        return found

    return call


def is_traced(x: Tensor) -> bool:
    """True under torch.compile or for tensor subclasses (e.g. FakeTensor), which may have no memory."""
    return bool(_plain) or torch.compiler.is_compiling() or (type(x) not in _WITH_MEMORY and not dry)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Treats tensors as traced, on all threads, for dispatch modes that must see torch's operators."""
    _plain.append(None)
    try:
        yield
    finally:
        _plain.pop()


class NoMemoryError(RuntimeError):
    """A kernel was given a tensor with released storage."""


# No memory is mapped below; released storage has an address of 0 and its view's offset.
_LOWEST = 1 << 24


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """`address` of each."""
    found = tuple(map(Tensor.data_ptr, tensors))
    return tuple(map(address, tensors)) if dry or min(found, default=_LOWEST) < _LOWEST else found


def address(tensor: Tensor) -> int:
    """The tensor's data pointer; NoMemoryError if its storage is released."""
    if dry:
        return 0
    found = tensor.data_ptr()
    if found == tensor.storage_offset() * tensor.itemsize and tensor.numel():
        raise NoMemoryError(
            f"a kernel was given a tensor of shape {[*tensor.shape]} whose memory is released and not filled: two "
            "mechanisms recompute the same layer, such as torch.utils.checkpoint around one that releases its "
            "activations: turn one of them off"
        )
    return found
