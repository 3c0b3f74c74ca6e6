"""Runs an operator forward and backward and measures how far it is from a float64 result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.errors import error


def forward_backward(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dout: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """[output, gradient of every input], computed on copies of `inputs` in `dtype` (their own by default)."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    leaves = [leaf if leaf is not t else leaf.clone() for leaf, t in zip(leaves, inputs, strict=True)]
    out = function(*leaves)
    out.backward(dout.to(out.dtype))
    gradients = []
    for leaf in leaves:
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return [out.detach(), *gradients]


def assert_not_worse(
    got: Sequence[torch.Tensor],
    replaced: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    slack: float,
    names: Sequence[str],
) -> None:
    """Every error of `got` is at most that of the path it replaces, plus `slack`."""
    for name, ours, theirs, truth in zip(names, got, replaced, exact, strict=True):
        assert ours.dtype == theirs.dtype, (name, ours.dtype, theirs.dtype)
        have, allowed = error(ours, truth), error(theirs, truth) + slack
        assert have <= allowed, f"{name}: error {have:.3g}, allowed {allowed:.3g}"


@contextmanager
def one_thread() -> Iterator[None]:
    """For thousands of calls on tiny tensors, which would mostly wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sizes(TorchDispatchMode):
    """Records the largest storage, in bytes, of what an operator returns, and the operators' names."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                self.largest = max(self.largest, item.untyped_storage().nbytes())
        return out
