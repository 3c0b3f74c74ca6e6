"""Proxies that run Megatron's code on parts of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.engine import Function


class FunctionModule(torch.nn.Module):
    """A function as a parameterless module; skips `Module.__init__`."""

    function: Function

    def __init__(self, function: Function) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class AttributeOverride:
    """Proxy of `original` with some attributes overridden."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        # copy.copy reads attributes before it sets any.
        if name == "_original":
            raise AttributeError(name)
        return getattr(self._original, name)


RECOMPUTED = "activation_is_recomputed"


def run_activation(forward: Function, mlp: Any, x: Any, *rest: Any, bias: Any = None, **kwargs: Any) -> Any:
    """Run the part of Megatron's MLP between its two linear layers.

    x, bias: the outputs of the first layer.
    """
    between = AttributeOverride(
        mlp,
        linear_fc1=FunctionModule(lambda _: (x, bias)),
        linear_fc2=FunctionModule(lambda y: (y, None)),
        **{RECOMPUTED: False},
    )
    return forward(between, x, *rest, **kwargs)[0]


class LinearCall:
    def __init__(self) -> None:
        self.input: torch.Tensor | None = None
        self.rest: tuple[Any, ...] = ()
        self.output: torch.Tensor | None = None


@contextlib.contextmanager
def seen(layer: Any, call: LinearCall) -> Iterator[None]:
    def keep(_: Any, given: Any, found: Any) -> None:
        call.input, *rest = given
        call.rest, call.output = tuple(rest), found[0]

    handle = layer.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
