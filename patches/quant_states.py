"""`--quant-states`: Adam's moments in 2 bytes (bf16) or 1 byte (fp8) instead of 4.

The fused AdamW (`--use-fused-adamw`, turned on) rounds stochastically; fp8 shares an exponent among 128 values. Reaches
Megatron's optimizers after `__init__`, and their checkpoint methods (`_shared.optimizer_state`): checkpoints hold fp32
and load with or without the flag.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.engine import Feature, Option, Relation, Session
from mindspeed_lite.optim.fused_adam import FusedStep
from mindspeed_lite.optim.quantized_moments import QuantizedMoments

from ._shared.optimizer_state import MOMENT_ARGS, main_params, state_patches

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.uint8}


def _use(optimizer: Any, inner: FusedStep, session: Session) -> None:
    wanted = _DTYPES[session.settings.quant_states]
    # Stages shard a shared weight at different places, so fp8 blocks would differ, and copies must round alike.
    mains = main_params([optimizer]).items()
    tied = {main for weight, (_, main) in mains if getattr(weight, "shared_embedding", False)}

    def dtype(parameter: torch.Tensor) -> torch.dtype:
        if parameter.dtype != torch.float32:
            return torch.float32
        return torch.bfloat16 if parameter in tied else wanted

    inner.quantized_moments = QuantizedMoments(inner, dtype)


FEATURE = Feature(
    name="quant_states",
    summary="Adam's moments in bf16 or fp8, stochastically rounded",
    options=(
        Option(
            "--quant-states",
            default=None,
            choices=tuple(_DTYPES),
            on="bf16",
            metavar="{bf16,fp8}",
            help="Keep both moments of Adam in bf16, or in fp8 with an exponent for every 128.",
        ),
    ),
    numerics="deviation",
    theme="memory",
    conflicting_args=MOMENT_ARGS,
    requires=(Relation("use_fused_adamw", "its step alone reads and writes narrow moments"),),
    operators=("adamw",),
    patches=state_patches("quant_states", _use),
)
