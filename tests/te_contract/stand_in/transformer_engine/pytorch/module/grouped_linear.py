"""Linear layers of experts, each on its own rows."""

from __future__ import annotations

from typing import Any

import torch

from ...recorded import keep, recorded
from .base import TransformerEngineBaseModule


class _GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, splits: list[int], layer: GroupedLinear, is_first: bool | None, *params: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(inp)
        ctx.splits, ctx.layer, ctx.is_first, ctx.params = splits, layer, is_first, params
        weights, biases = params[: len(splits)], params[len(splits) :]
        parts = [part @ weight.t() for part, weight in zip(inp.split(splits), weights, strict=True)]
        if biases:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, splits, (inp,) = ctx.layer, ctx.splits, ctx.saved_tensors
        weights, biases = ctx.params[: len(splits)], ctx.params[len(splits) :]
        parts = grads[0].contiguous().split(splits)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

        def weight_gradients() -> list[tuple[Any, Any]]:
            each = zip(weights, biases or [None] * len(weights), inp.split(splits), parts, strict=True)
            return [layer._gradients(*tensors, ctx.is_first) for tensors in each]

        weight_grads, bias_grads = [None] * len(weights), [None] * len(biases)
        if layer.need_backward_dw() and weights[0].requires_grad:
            layer.wgrad_store.put([], weight_gradients)
        else:
            weight_grads, bias_grads = zip(*weight_gradients(), strict=True)
        if weights[0].requires_grad and weight_grads[0] is None:
            weight_grads = [layer._placeholder(weight) for weight in weights]
        return grad_input, None, None, None, *weight_grads, *(bias_grads if biases else ())


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i W_i^T + b_i for each of `num_gemms` groups of rows."""

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__(given.name)
        if given.single_grouped_weight or given.single_grouped_bias or given.ub_overlap_rs or given.ub_overlap_ag:
            raise RuntimeError("Transformer Engine's stand-in keeps a weight for each expert, and overlaps nothing")
        keep(self, given, "num_gemms save_original_input single_grouped_weight single_grouped_bias")
        self._build(given, range(given.num_gemms))

    def backward_dw(self) -> None:
        """Compute delayed gradients, if there are any."""
        if self.need_backward_dw() and self.wgrad_store.context is not None and not self.wgrad_store.context.empty():
            super().backward_dw()

    @recorded
    def forward(self, given: Any) -> Any:
        """The products; with biases apart where `return_bias`."""
        splits = given.m_splits.tolist() if isinstance(given.m_splits, torch.Tensor) else list(given.m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} experts")
        weights, biases = zip(*self._pairs(), strict=True)
        result = _GroupedLinearFunction.apply(
            given.inp, splits, self, given.is_first_microbatch, *weights, *(biases if self.apply_bias else ())
        )
        return (result, list(biases)) if self.return_bias else result
