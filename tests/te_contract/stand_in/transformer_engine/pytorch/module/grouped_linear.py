"""Linear layers of experts, each on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import TransformerEngineBaseModule, WeightGradStore


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
            return [layer.weight_gradient(*tensors, ctx.is_first) for tensors in each]

        weight_grads, bias_grads = [None] * len(weights), [None] * len(biases)
        if layer.need_backward_dw() and weights[0].requires_grad:
            layer.wgrad_store.put([], weight_gradients)
        else:
            weight_grads, bias_grads = zip(*weight_gradients(), strict=True)
        if weights[0].requires_grad and weight_grads[0] is None:
            weight_grads = [layer.placeholder(weight) for weight in weights]
        return grad_input, None, None, None, *weight_grads, *(bias_grads if biases else ())


class GroupedLinear(TransformerEngineBaseModule):
    """y_i = x_i W_i^T + b_i for each of `num_gemms` groups of rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        if single_grouped_weight or single_grouped_bias or ub_overlap_rs or ub_overlap_ag:
            raise RuntimeError("Transformer Engine's stand-in keeps a weight for each expert, and overlaps nothing")
        self.set_parallelism(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.single_grouped_weight, self.single_grouped_bias = False, False
        self.rng_tracker_name, self.ub_name, self.save_original_input = rng_tracker_name, ub_name, save_original_input
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = out_features // self.tp_size
        elif parallel_mode == "row":
            self.in_features = in_features // self.tp_size
        options: Any = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        init = init_method or (lambda value: torch.nn.init.normal_(value, 0.0, 0.023))
        for index in range(num_gemms):
            weight = torch.empty(self.out_features, self.in_features, **options)
            self.add_parameter(f"weight{index}", weight, init, get_rng_state_tracker)
            if bias:
                value = torch.empty(self.out_features, **options)
                self.add_parameter(f"bias{index}", value, torch.nn.init.zeros_, None)
            else:
                setattr(self, f"bias{index}", torch.empty(0, **options))
        names = [[f"{kind}{index}" for index in range(num_gemms)] for kind in ("weight", "bias")]
        self.mark_parallel(names[0], names[1] if bias else [])

    def delayed_parameters(self) -> list[tuple[Any, Any]]:
        """Weight and bias of each expert."""
        return [(getattr(self, f"weight{i}"), getattr(self, f"bias{i}")) for i in range(self.num_gemms)]

    def backward_dw(self) -> None:
        """Compute delayed gradients, if there are any."""
        if self.need_backward_dw() and self.wgrad_store.context is not None and not self.wgrad_store.context.empty():
            super().backward_dw()

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:
        """The products; with biases apart where `return_bias`."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} experts")
        weights, biases = zip(*self.delayed_parameters(), strict=True)
        result = _GroupedLinearFunction.apply(
            inp, splits, self, is_first_microbatch, *weights, *(biases if self.apply_bias else ())
        )
        return (result, list(biases)) if self.return_bias else result
