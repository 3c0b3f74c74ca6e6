"""Linear layers that ranks may share, alone or after a norm."""

from __future__ import annotations

from typing import Any

import torch

from ...recorded import keep, recorded
from ..collectives import gather, reduce, reduce_scatter
from .base import TransformerEngineBaseModule
from .norm import normalize


class _LinearFunction(torch.autograd.Function):
    """Saves this rank's input only, and gathers it again for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: Any, bias: Any, layer: Any, is_first: bool | None) -> torch.Tensor:
        ctx.save_for_backward(inp)
        ctx.layer, ctx.weight, ctx.bias, ctx.is_first = layer, weight, bias, is_first
        gathers = layer.parallel_mode == "column" and layer.sequence_parallel
        out = (gather(inp, layer.tp_group) if gathers else inp) @ weight.t()
        if layer.parallel_mode == "row":
            out = (reduce_scatter if layer.sequence_parallel else reduce)(out, layer.tp_group)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, (inp,) = ctx.layer, ctx.saved_tensors
        grad = after_bias = grads[0].contiguous()
        if layer.parallel_mode == "row" and layer.sequence_parallel:
            grad = gather(grad, layer.tp_group)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad @ ctx.weight
            if layer.parallel_mode == "column":
                grad_input = (reduce_scatter if layer.sequence_parallel else reduce)(grad_input, layer.tp_group)
        if layer.parallel_mode == "column" and layer.sequence_parallel:
            inp = gather(inp, layer.tp_group)

        def weight_gradients() -> list[tuple[Any, Any]]:
            weight_grad, _ = layer._gradients(ctx.weight, None, inp, grad, ctx.is_first)
            has_bias = ctx.bias is not None and ctx.bias.requires_grad
            return [(weight_grad, after_bias.flatten(0, -2).sum(0) if has_bias else None)]

        if layer.need_backward_dw() and ctx.weight.requires_grad:
            layer.wgrad_store.put([], weight_gradients)
            return grad_input, layer._placeholder(ctx.weight), None, None, None
        weight_grad, bias_grad = weight_gradients()[0]
        if ctx.weight.requires_grad and weight_grad is None:
            weight_grad = layer._placeholder(ctx.weight)
        return grad_input, weight_grad, bias_grad, None, None


def _product(layer: Any, inp: torch.Tensor, is_first: bool | None) -> Any:
    """The product; with its bias apart where `return_bias`."""
    out = _LinearFunction.apply(inp, layer.weight, layer.bias if layer.apply_bias else None, layer, is_first)
    return (out, layer.bias.to(inp.dtype)) if layer.return_bias else out


class Linear(TransformerEngineBaseModule):
    """y = x W^T + b."""

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__(given.name)
        keep(self, given, "symmetric_ar_type save_original_input")
        _refuse(given)
        self._build(given, [""])

    @recorded
    def forward(self, given: Any) -> Any:
        """The product; with its bias apart where `return_bias`."""
        return _product(self, given.inp, given.is_first_microbatch)


class LayerNormLinear(TransformerEngineBaseModule):
    """y = norm(x) W^T + b."""

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__(given.name)
        keep(self, given, "eps normalization zero_centered_gamma return_layernorm_output symmetric_ar_type")
        _refuse(given)
        self._build(given, [""])
        options: Any = {"dtype": given.params_dtype or torch.get_default_dtype(), "device": given.device}
        one = 0.0 if given.zero_centered_gamma else 1.0
        for name, value in (("weight", one), ("bias", 0.0)):
            has = name == "weight" or given.normalization == "LayerNorm"
            param: Any = torch.nn.Parameter(torch.full((given.in_features,), value, **options)) if has else None
            self.register_parameter(f"layer_norm_{name}", param)
            if has:
                param.sequence_parallel = self.sequence_parallel

    @recorded
    def forward(self, given: Any) -> Any:
        """The product of the normalized input; with the normalized input where asked."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normalized = normalize(given.inp, weight, bias, self.eps, self.zero_centered_gamma, self.normalization)
        out = _product(self, normalized, given.is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, normalized) if self.return_bias else (out, normalized)


def _refuse(given: Any) -> None:
    overlaps = given.ub_overlap_ag or given.ub_overlap_rs or given.ub_overlap_rs_dgrad
    if given.parameters_split is not None or overlaps:
        raise RuntimeError("Transformer Engine's stand-in neither splits parameters nor overlaps collectives")
