"""`--use-fused-swiglu`: the MLP's activation with bias and weights as one operator.

Reaches `megatron.core.fusions` (SwiGLU, GeGLU, quick GeGLU, GELU with bias, squared ReLU) and
`TransformerConfig.__post_init__`, which turns `bias_activation_fusion` on for SwiGLU. Saves only inputs. Leaves
activations that are one torch operator alone. Falls back for fp8 input storage, Transformer Engine's offloading, and a
clamp with a bias.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Function, Override, Session, matches
from mindspeed_lite.ops.activation import activation
from mindspeed_lite.platform.megatron import CONFIG, HOST

from ._shared.conditions import holding
from ._shared.wrappers import Make, act_again, leave_out, verify

_FP8 = "activation_func_fp8_input_store keeps the input in fp8, which the operator does not"
_CLAMP = "Megatron's fused function clamps before it adds the bias; its unfused form and the operator clamp after"
_OFFLOAD = "Transformer Engine's activation offloading marks the tensors that Megatron's own function keeps"


def _run(session: Session, original: Function, kind: str, x: Any, bias: Any, weights: Any, **options: Any) -> Any:
    """Run the operator; the verifier compares it with `original`, Megatron's function."""
    if weights is not None:
        # Megatron passes one weight per row, leading dimensions flattened.
        weights = weights.reshape(*x.shape[:-1], 1)
    given = {name: each for name, each in (("x", x), ("bias", bias), ("weights", weights)) if each is not None}

    def ours(*tensors: Any) -> Any:
        named = dict(zip(given, tensors, strict=True))
        return activation(named["x"], kind, named.get("bias"), named.get("weights"), **options)

    def theirs(*tensors: Any) -> Any:
        return original(**dict(zip(given, tensors, strict=True)))

    if bias is not None and weights is not None and kind == "swiglu":
        leave_out(session, FEATURE, "activation", "Megatron has no SwiGLU with both bias and weights")
    else:
        verify(session, FEATURE, "activation", ours, theirs, given, variant=kind)
    return activation(x, kind, bias, weights, **options)


def _fused(kind: str) -> Make:
    """Replacement of Megatron's fused functions, which have some of these parameters."""

    def make(wrapped: Function, session: Session) -> Function:
        def fused(
            input: Any,
            bias: Any = None,
            weights: Any = None,
            fp8_input_store: bool = False,
            cpu_offload_input: bool = False,
            linear_offset: float = 0.0,
            clamp_value: float | None = None,
        ) -> Any:
            more = (fp8_input_store, cpu_offload_input, linear_offset, clamp_value)
            conflict = bias is not None and clamp_value is not None
            if reasons := holding({_FP8: fp8_input_store, _OFFLOAD: cpu_offload_input, _CLAMP: conflict}):
                session.fallback(FEATURE.name, "; ".join(reasons))
                return wrapped(input, bias, weights, *more)

            def original(x: Any, bias: Any = bias, weights: Any = weights) -> Any:
                return wrapped(x, bias, weights if weights is None else weights.reshape(-1, 1), *more)

            options = {"linear_offset": linear_offset, "clamp": clamp_value}
            return _run(session, original, kind, input, bias, weights, **options)

        return fused

    return make


def _bias_gelu(wrapped: Function, session: Session) -> Function:
    # The target is an autograd function's `apply`; this is its signature.
    def bias_gelu_impl(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return wrapped(*args, **kwargs)  # raises Megatron's own error
        return _run(session, lambda x, bias=args[1]: wrapped(x, bias), "gelu", *args, None)

    return bias_gelu_impl


def _squared_relu(wrapped: Function, session: Session) -> Function:
    def squared_relu(x: Any) -> Any:
        return _run(session, wrapped, "squared_relu", x, None, None)

    return squared_relu


#: Configurations by id, for the next time that the feature begins.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _configuration(wrapped: Function, session: Session) -> Function:
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
            _known[id(self)] = self
            session.mark(self, "bias_activation_fusion", True)
        wrapped(self)

    act_again(session, _known.values(), lambda config: session.mark(config, "bias_activation_fusion", True))
    return __post_init__


def _why_not(context: Context) -> list[str]:
    reasons = []
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
    summary="SwiGLU, GeGLU, GELU with bias or squared ReLU, with bias and weights, in one operator that saves inputs",
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    conflicting_args={
        "use_te_activation_func": "--use-te-activation-func has Transformer Engine compute the activation",
        "activation_func_fp8_input_store": f"--activation-func-fp8-input-store: {_FP8}",
    },
    operators=("activation",),
    patches=(
        *(
            Override(f"megatron.core.fusions.{target}_impl", _fused(kind), by_name=True, versions=versions)
            for target, kind, versions in (
                ("fused_bias_swiglu:bias_swiglu", "swiglu", ""),
                ("fused_bias_swiglu:weighted_bias_swiglu", "swiglu", ""),
                ("fused_bias_geglu:bias_geglu", "geglu", ""),
                ("fused_bias_geglu:weighted_bias_quick_geglu", "quick_geglu", ">=0.15"),
                ("fused_weighted_squared_relu:weighted_squared_relu", "squared_relu", ">=0.14"),
            )
        ),
        # An autograd function's `apply`, which both import by name.
        Override("megatron.core.transformer.mlp:bias_gelu_impl", _bias_gelu),
        Override("megatron.core.transformer.moe.shared_experts:bias_gelu_impl", _bias_gelu),
        Override("megatron.core.activations:squared_relu", _squared_relu, versions=">=0.14"),
        Around(
            f"{CONFIG}.__post_init__",
            _configuration,
            reads=("activation_func", "activation_func_fp8_input_store", "bias_activation_fusion", "gated_linear_unit"),
        ),
    ),
)
