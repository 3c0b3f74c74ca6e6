"""Releases what an MLP keeps between its two linear layers, until the gradient of the second one's output is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.memory.released import ReleasedTensor

from .. import recompute_activation_function
from .proxies import AttributeOverride, FunctionModule


class LinearCall:
    """One call of a linear layer: what it was given, and what came of it; None until it has run."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None


@contextlib.contextmanager
def seen(layer: Any) -> Iterator[LinearCall]:
    """Keeps the call of a linear layer that Megatron's code makes inside."""
    call = LinearCall()

    def keep(_: Any, given: Any, found: Any) -> None:
        call.input, call.output = given[0], found[0]

    handle = layer.register_forward_hook(keep)
    try:
        yield call
    finally:
        handle.remove()


def runs_again(layer: Any) -> bool:
    """Whether a linear layer gives the same once more: an adapter may drop at random, and a hook change what comes."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    return type(layer) is ColumnParallelLinear and not layer._forward_hooks


def release(mlp: Any, first: LinearCall, second: LinearCall, with_input: bool) -> None:
    """Release the output of the activation, and with_input its input, of which the first layer's product comes again.

    Args:
        mlp: Megatron's, whose activation runs again on what is kept.
        first: the call of its first layer, whose input is kept.
        second: the call of its second layer.
    """
    x, before, after, out = first.input, first.output, second.input, second.output
    if x is None or before is None or after is None or out is None or not out.requires_grad:
        return
    if before.untyped_storage()._cdata == after.untyped_storage()._cdata:
        # An activation in place, of which nothing can be computed again.
        return
    x, before = x.detach(), before.detach()
    waiting = [(ReleasedTensor(after), ReleasedTensor(before) if with_input else None, x, before)]

    def fill(_: torch.Tensor) -> None:
        if not waiting:
            return
        output, input_, x, before = waiting.pop()
        with torch.no_grad():
            if input_ is not None:
                layer = mlp.linear_fc1
                # Past its hooks: its parameters are here.
                input_.fill(type(layer).forward(layer, x)[0])
            output.fill(_activation(mlp, before))

    out.register_hook(fill)  # type: ignore[no-untyped-call]


def _activation(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """What Megatron's MLP does between its two linear layers."""
    from megatron.core.transformer.mlp import MLP

    between = AttributeOverride(
        mlp,
        linear_fc1=FunctionModule(lambda _: (x, None)),
        linear_fc2=FunctionModule(lambda y: (y, None)),
        **{recompute_activation_function.CHOSEN: False},
    )
    found: torch.Tensor = MLP.forward(between, x)[0]
    return found


__all__ = ["LinearCall", "release", "runs_again", "seen"]
