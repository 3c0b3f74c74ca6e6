"""`--bias-dropout-fusion`: bias, dropout and residual of a layer in one pass.

Reaches `bias_dropout_add_fused_train`; Megatron fuses by torch.compile, slow on CPU and absent on NPU. Leaves
inference, unfused layers and warm-up alone. Falls back for `--no-bias-dropout-fusion`, on CUDA, and for differing
dtypes of residual and output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Option, Override, Session
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add

from ._shared.conditions import explicitly_disabled_reasons

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
        if session.verifier is not None:
            _verify(session, wrapped, x, residual, bias, prob)
        return bias_dropout_add(x, residual, bias, prob)

    return bias_dropout_add_fused_train


def _verify(
    session: Session,
    wrapped: Function,
    x: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    prob: float,
) -> None:
    verifier: Any = session.verifier
    if prob:
        verifier.leave_out(FEATURE.name, "bias_dropout_add", "dropout is on, and each draws in its own way")
        return

    def with_bias(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, residual, bias=None: function(x, residual, bias, 0.0)

    given = {"x": x, "residual": residual, **({} if bias is None else {"bias": bias})}
    verifier.check(
        FEATURE.name,
        "bias_dropout_add",
        FEATURE.numerics,
        with_bias(bias_dropout_add),
        with_bias(lambda x, residual, bias, prob: wrapped((x, bias), residual, prob)),
        given,
        against="Megatron's function",
    )


def _why_not(context: Context) -> Sequence[str]:
    reasons = explicitly_disabled_reasons(context, ARGUMENT, "--no-bias-dropout-fusion")
    if context.device == "cuda":
        reasons.append("torch.compile fuses it on CUDA, as Megatron has it")
    return reasons


FEATURE = Feature(
    name="bias_dropout_fusion",
    summary="bias, dropout and residual of a transformer layer in one pass",
    options=(
        Option(
            "--bias-dropout-fusion",
            help="Add bias, dropout and residual in one pass, without torch.compile.",
            # Megatron's flag of the plain name defaults to on.
            name="use_bias_dropout_fusion",
        ),
    ),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    operators=("bias_dropout_add",),
    patches=(Override("megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train", _train),),
)
