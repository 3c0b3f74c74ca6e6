"""`--use-fused-swiglu`: the MLP's activation with bias and weights as one operator.

Reaches `megatron.core.fusions` (SwiGLU, GeGLU, quick GeGLU, GELU with bias, squared ReLU) and
`TransformerConfig.__post_init__`, which turns `bias_activation_fusion` on for SwiGLU. Saves only inputs. Leaves
activations that are one torch operator alone. Falls back for fp8 input storage, Transformer Engine's offloading, and a
clamp with a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, Override, Session, matches
from mindspeed_lite.ops.activation import activation
from mindspeed_lite.platform.megatron import CONFIG, HOST

_FP8 = "activation_func_fp8_input_store keeps the input in fp8, which the operator does not"
_CLAMP = "Megatron's fused function clamps before it adds the bias; its unfused form and the operator clamp after"
_OFFLOAD = "Transformer Engine's activation offloading marks the tensors that Megatron's own function keeps"


def _run(
    session: Session,
    wrapped: Callable[..., Any],
    kind: str,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    if weights is not None:
        # Megatron passes one weight per row, leading dimensions flattened.
        weights = weights.reshape(*x.shape[:-1], 1)
    if session.verifier is not None:
        given = {"x": x, "bias": bias, "weights": weights}
        names = [name for name, tensor in given.items() if tensor is not None]

        def with_names(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def call(*tensors: torch.Tensor) -> torch.Tensor:
                given = dict(zip(names, tensors, strict=True))
                return function(given["x"], kind, given.get("bias"), given.get("weights"), **options)

            return call

        if bias is not None and weights is not None and kind == "swiglu":
            session.verifier.leave_out(FEATURE.name, "activation", "Megatron has no SwiGLU with both bias and weights")
        else:
            session.verifier.check(
                FEATURE.name,
                "activation",
                FEATURE.numerics,
                with_names(activation),
                wrapped,
                {name: given[name] for name in names},  # type: ignore[misc]
                against="Megatron's function",
                variant=kind,
            )
    return activation(x, kind, bias, weights, **options)


def _bias_swiglu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def bias_swiglu_impl(input: Any, bias: Any, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Any:
        if fp8_input_store or cpu_offload_input:
            session.fallback(FEATURE.name, _FP8 if fp8_input_store else _OFFLOAD)
            return wrapped(input, bias, fp8_input_store, cpu_offload_input)
        return _run(session, lambda x, bias=bias: wrapped(x, bias), "swiglu", input, bias)

    return bias_swiglu_impl


def _weighted_bias_swiglu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def weighted_bias_swiglu_impl(input: Any, bias: Any, weights: Any, fp8_input_store: bool = False) -> Any:
        if fp8_input_store:
            session.fallback(FEATURE.name, _FP8)
            return wrapped(input, bias, weights, fp8_input_store)
        return _run(session, lambda x, weights: wrapped(x, None, _flat(weights)), "swiglu", input, bias, weights)

    return weighted_bias_swiglu_impl


def _bias_geglu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def bias_geglu_impl(input: Any, bias: Any) -> Any:
        return _run(session, lambda x, bias=bias: wrapped(x, bias), "geglu", input, bias)

    return bias_geglu_impl


def _weighted_bias_quick_geglu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def weighted_bias_quick_geglu_impl(
        input: Any,
        bias: Any,
        weights: Any,
        fp8_input_store: bool = False,
        linear_offset: float = 0.0,
        clamp_value: float | None = None,
    ) -> Any:
        reasons = [_FP8] if fp8_input_store else []
        if bias is not None and clamp_value is not None:
            reasons.append(_CLAMP)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(input, bias, weights, fp8_input_store, linear_offset, clamp_value)

        def original(x: Any, *rest: Any) -> Any:
            return wrapped(x, rest[0] if len(rest) > 1 else bias, _flat(rest[-1]), False, linear_offset, clamp_value)

        options = {"linear_offset": linear_offset, "clamp": clamp_value}
        return _run(session, original, "quick_geglu", input, bias, weights, **options)

    return weighted_bias_quick_geglu_impl


def _bias_gelu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    # The target is an autograd function's `apply`; this is its signature.
    def bias_gelu_impl(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return wrapped(*args, **kwargs)  # raises Megatron's own error
        return _run(session, wrapped, "gelu", *args)

    return bias_gelu_impl


def _weighted_squared_relu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def weighted_squared_relu_impl(input: Any, weights: Any) -> Any:
        original = lambda x, weights: wrapped(x, _flat(weights))  # noqa: E731
        return _run(session, original, "squared_relu", input, None, weights)

    return weighted_squared_relu_impl


def _squared_relu(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def squared_relu(x: Any) -> Any:
        return _run(session, wrapped, "squared_relu", x, None)

    return squared_relu


def _configuration(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def __post_init__(self: Any) -> None:
        # Megatron's fused SwiGLU ignores a clamp and refuses an offset.
        clamp, offset = getattr(self, "activation_func_clamp_value", None), getattr(self, "glu_linear_offset", 0.0)
        has_clamp_or_offset = clamp is not None or offset != 0.0
        others = getattr(self, "use_te_activation_func", False) or self.activation_func_fp8_input_store
        if (
            self.gated_linear_unit
            and self.activation_func is torch.nn.functional.silu
            and not (has_clamp_or_offset or others)
        ):
            session.mark(self, "bias_activation_fusion", True)
        wrapped(self)

    return __post_init__


def _flat(weights: torch.Tensor) -> torch.Tensor:
    return weights.reshape(-1, 1)


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("use_te_activation_func", False):
        reasons.append("--use-te-activation-func has Transformer Engine compute the activation")
    if context.arg("activation_func_fp8_input_store", False):
        reasons.append(f"--activation-func-fp8-input-store: {_FP8}")
    if context.arg("squared_relu", False) and matches("<0.14", context.versions.get(HOST, "1")):
        reasons.append("--squared-relu is a function of the script before Megatron 0.14, which has no name to swap")
    if context.host_args is None or context.arg("swiglu", False) or context.arg("squared_relu", False):
        return reasons
    fused = context.arg("bias_gelu_fusion", True)
    if context.arg("quick_geglu", False):
        if not fused:
            reasons.append("--quick-geglu without bias_gelu_fusion: the model computes its activation with torch's")
    elif not context.arg("add_bias_linear", True):
        reasons.append("the model's activation is GELU without bias, which is one operator of torch already")
    elif not fused:
        reasons.append("--no-bias-gelu-fusion: the model's activation is torch's own GELU, in its exact form")
    return reasons


FEATURE = Feature(
    name="use_fused_swiglu",
    summary="the MLP's activation with bias and weights as one operator that keeps only its input",
    options=(
        Option(
            "--use-fused-swiglu",
            help="Compute SwiGLU, GeGLU, GELU with bias and squared ReLU, with their bias and per-token weights, with "
            "one fused operator.",
        ),
    ),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    operators=("activation",),
    patches=(
        Override("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl", _bias_swiglu, by_name=True),
        Override(
            "megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl", _weighted_bias_swiglu, by_name=True
        ),
        Override("megatron.core.fusions.fused_bias_geglu:bias_geglu_impl", _bias_geglu),
        Override(
            "megatron.core.fusions.fused_bias_geglu:weighted_bias_quick_geglu_impl",
            _weighted_bias_quick_geglu,
            absent_in="<0.15",
        ),
        # An autograd function's `apply`, which both import by name.
        Override("megatron.core.transformer.mlp:bias_gelu_impl", _bias_gelu),
        Override("megatron.core.transformer.moe.shared_experts:bias_gelu_impl", _bias_gelu),
        Override(
            "megatron.core.fusions.fused_weighted_squared_relu:weighted_squared_relu_impl",
            _weighted_squared_relu,
            absent_in="<0.14",
        ),
        Override("megatron.core.activations:squared_relu", _squared_relu, absent_in="<0.14"),
        Around(
            f"{CONFIG}.__post_init__",
            _configuration,
            reads=(
                "activation_func",
                "activation_func_fp8_input_store",
                "bias_activation_fusion",
                "gated_linear_unit",
            ),
        ),
    ),
)
