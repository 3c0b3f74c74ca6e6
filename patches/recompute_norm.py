"""`--recompute-norm`: release a layer's two norms after use and recompute them.

Reaches the norms before attention and MLP, outputs [s, b, h]. Unlike Megatron's `--recompute-modules layernorm` it
works per layer and with `--recompute-granularity full --recompute-method block`. Corrects Megatron's checkpoint, which
needs Transformer Engine and drops gradients where the input needs none. `--recompute-norm-num-layers N` limits it to
the first N layers of each pipeline rank.
"""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_lite.engine import Context, Session

from ._shared import recompute
from ._shared.conditions import local
from ._shared.wrappers import at_end


def prepare(layer: Any, session: Session) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    # A norm fused into a linear layer is an IdentityOp.
    for name, checkpoint in (
        ("input_layernorm", "input_layernorm_checkpoint"),
        ("pre_mlp_layernorm", "pre_mlp_norm_checkpoint"),
    ):
        switch = f"recompute_{name}"
        if not getattr(layer, switch, False):
            # Megatron keeps the last checkpoint in the layer.
            at_end(session, layer, functools.partial(_forget, checkpoint))
        session.mark(layer, switch, not isinstance(getattr(layer, name), IdentityOp))


def _forget(name: str, layer: Any) -> None:
    vars(layer).pop(name, None)


def _why_not(context: Context) -> list[str]:
    if context.arg("num_experts", None):
        return []
    return local("computes norms within linear layers, which keep their output; experts have one of their own")(context)


FEATURE = recompute.feature_of_layers(
    "recompute_norm",
    summary="a layer's norms released after use and recomputed",
    numerics="ulp",
    theme="memory",
    prepare=prepare,
    condition=_why_not,
    reads=("input_layernorm", "pre_mlp_layernorm", "recompute_input_layernorm", "recompute_pre_mlp_layernorm"),
    patches=(recompute.CHECKPOINT_PATCH,),
)
