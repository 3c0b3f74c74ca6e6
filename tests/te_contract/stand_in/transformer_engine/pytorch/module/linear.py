"""Linear layers that ranks may share, alone or after a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..distributed import gather, reduce, reduce_scatter
from .base import TransformerEngineBaseModule, WeightGradStore
from .norm import normalize


class _LinearFunction(torch.autograd.Function):
    """Saves this rank's input only, and gathers it again for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, weight: Any, bias: Any, layer: Linear, is_first: bool | None
    ) -> torch.Tensor:
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
            weight_grad, _ = layer.weight_gradient(ctx.weight, None, inp, grad, ctx.is_first)
            has_bias = ctx.bias is not None and ctx.bias.requires_grad
            return [(weight_grad, after_bias.flatten(0, -2).sum(0) if has_bias else None)]

        if layer.need_backward_dw() and ctx.weight.requires_grad:
            layer.wgrad_store.put([], weight_gradients)
            return grad_input, layer.placeholder(ctx.weight), None, None, None
        weight_grad, bias_grad = weight_gradients()[0]
        if ctx.weight.requires_grad and weight_grad is None:
            weight_grad = layer.placeholder(ctx.weight)
        return grad_input, weight_grad, bias_grad, None, None


class Linear(TransformerEngineBaseModule):
    """y = x W^T + b."""

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if parameters_split is not None or ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad:
            raise RuntimeError("Transformer Engine's stand-in neither splits parameters nor overlaps collectives")
        self.set_parallelism(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.rng_tracker_name, self.ub_name = rng_tracker_name or getattr(self, "rng_tracker_name", None), ub_name
        self.symmetric_ar_type, self.save_original_input = symmetric_ar_type, save_original_input
        self.wgrad_store = WeightGradStore(delay_wgrad_compute, ub_bulk_wgrad)
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = out_features // self.tp_size
        elif parallel_mode == "row":
            self.in_features = in_features // self.tp_size
        options: Any = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        weight = torch.empty(self.out_features, self.in_features, **options)
        init = init_method or (lambda value: torch.nn.init.normal_(value, 0.0, 0.023))
        self.add_parameter("weight", weight, init, get_rng_state_tracker)
        if bias:
            self.add_parameter("bias", torch.empty(self.out_features, **options), torch.nn.init.zeros_, None)
        else:
            self.bias = torch.empty(0, **options)
        self.mark_parallel(["weight"], ["bias"] if bias else [])

    def delayed_parameters(self) -> list[tuple[Any, Any]]:
        """Weight and bias."""
        return [(self.weight, self.bias)]

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """The product; with its bias apart where `return_bias`."""
        out = _LinearFunction.apply(inp, self.weight, self.bias if self.apply_bias else None, self, is_first_microbatch)
        return (out, self.bias.to(inp.dtype)) if self.return_bias else out


class LayerNormLinear(Linear):
    """y = norm(x) W^T + b."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            parameters_split=parameters_split,
            device=device,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
            name=name,
        )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        options: Any = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        one = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = torch.nn.Parameter(torch.full((in_features,), one, **options))
        has_bias = normalization == "LayerNorm"
        self.register_parameter(
            "layer_norm_bias", torch.nn.Parameter(torch.zeros(in_features, **options)) if has_bias else None
        )
        for param in (self.layer_norm_weight, self.layer_norm_bias):
            if param is not None:
                param.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """The product of the normalized input; with the normalized input where asked."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normalized = normalize(inp, weight, bias, self.eps, self.zero_centered_gamma, self.normalization)
        out = super().forward(normalized, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, normalized) if self.return_bias else (out, normalized)
