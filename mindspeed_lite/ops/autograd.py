"""autograd.Function for kernels with a backward pass of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops import traced

Inputs = Sequence[Tensor | None]
Map = Callable[[Tensor], Tensor]


class Kernel(NamedTuple):
    """Forward and backward pass of an operator.

    forward(inputs, options) -> (outputs, saved): a tensor, or a tuple with only the first differentiable; saved
    tensors.
    backward(dout, saved, options, wanted) -> the gradient of each input, or None.
    """

    forward: Callable[[Any, Any], tuple[Any, Inputs]]
    backward: Callable[[Tensor, Any, Any, Sequence[bool]], Inputs]


class KernelFunction(torch.autograd.Function):
    """Runs a kernel; a subclass gives it another name in profiles."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, options: Any, *inputs: Tensor | None) -> Any:
        outputs, saved = _run(kernel.forward, inputs, options)
        ctx.save_for_backward(*saved)
        ctx.kernel, ctx.options = kernel, options
        ctx.set_materialize_grads(False)
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*(each for each in outputs[1:] if each is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dout is None:
            return (None, None, *(None for _ in wanted))
        gradients = _run(ctx.kernel.backward, dout, ctx.saved_tensors, ctx.options, wanted)
        return (None, None, *(each if want else None for each, want in zip(gradients, wanted, strict=True)))


def apply(kernel: Kernel, inputs: Inputs, options: Any = None, function: type[KernelFunction] = KernelFunction) -> Any:
    """The outputs of `kernel`, recorded for the backward pass if an input requires a gradient."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        return function.apply(kernel, options, *inputs)  # type: ignore[no-untyped-call]
    return _run(kernel.forward, inputs, options)[0]


def _run(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given) if traced.observer is None else traced.observer(function, *given)


def linear_map(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
    """Linear `forward(x)` whose backward applies the adjoint; saves no tensor."""
    kernel = Kernel(lambda inputs, _: (forward(inputs[0]), ()), lambda dy, *_: (adjoint(dy),))
    y: Tensor = apply(kernel, (x,))
    return y
