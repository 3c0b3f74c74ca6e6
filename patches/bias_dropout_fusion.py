"""`--bias-dropout-fusion`: bias, dropout and residual of a layer in one pass.

Reaches `bias_dropout_add_fused_train`; Megatron fuses by torch.compile, slow on CPU and absent on NPU. Leaves
inference, unfused layers and warm-up alone. Falls back for `--no-bias-dropout-fusion`, on CUDA, and for differing
dtypes of residual and output.
"""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Context, Feature, Function, Option, Override, Session
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add

from ._shared.conditions import every, not_disabled
from ._shared.wrappers import leave_out, verify

ARGUMENT = "bias_dropout_fusion"


def _train(wrapped: Function, session: Session) -> Function:
    def bias_dropout_add_fused_train(x_with_bias: Any, residual: Any, prob: Any) -> Any:
        x, bias = x_with_bias
        if x.dtype != residual.dtype:
            session.fallback(FEATURE.name, f"the residual is {residual.dtype} and what is added to it {x.dtype}")
            return wrapped(x_with_bias, residual, prob)
        if bias is not None and bias.numel() != x.shape[-1]:
            # Megatron's warm-up: its draws affect initial weights drawn later.
            return wrapped(x_with_bias, residual, prob)
        _verify(session, wrapped, x, residual, bias, prob)
        return bias_dropout_add(x, residual, bias, prob)

    return bias_dropout_add_fused_train


def _verify(session: Session, wrapped: Function, x: Any, residual: Any, bias: Any, prob: float) -> None:
    if prob:
        leave_out(session, FEATURE, "bias_dropout_add", "dropout is on, and each draws in its own way")
        return

    def ours(x: Any, residual: Any, bias: Any = None) -> Any:
        return bias_dropout_add(x, residual, bias, 0.0)

    def theirs(x: Any, residual: Any, bias: Any = None) -> Any:
        return wrapped((x, bias), residual, 0.0)

    given = {"x": x, "residual": residual, **({} if bias is None else {"bias": bias})}
    verify(session, FEATURE, "bias_dropout_add", ours, theirs, given)


def _why_not(context: Context) -> list[str]:
    return ["torch.compile fuses it on CUDA, as Megatron has it"] if context.device == "cuda" else []


FEATURE = Feature(
    name="bias_dropout_fusion",
    summary="bias, dropout and residual of a transformer layer in one pass, without torch.compile",
    # Megatron's flag of the plain name defaults to on.
    options=(Option("--bias-dropout-fusion", name="use_bias_dropout_fusion"),),
    numerics="ulp",
    theme="operators",
    condition=every(not_disabled(ARGUMENT, "--no-bias-dropout-fusion"), _why_not),
    operators=("bias_dropout_add",),
    patches=(Override("megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train", _train),),
)
