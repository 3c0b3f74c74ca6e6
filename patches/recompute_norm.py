"""`--recompute-norm`: the two norms of a layer are released after use and recomputed from the layer's input.

Reaches the norm before attention and the one before the MLP or the experts. Each output, [s, b, h] (divided by TP
under sequence parallelism), is kept by the linear layers behind it; its memory is released when attention or the MLP
has run, and the norm runs again when their gradient arrives. Megatron has that for all layers as `layernorm` in
`--recompute-modules`, for selective recomputation alone; this flag turns it on layer by layer and beside
`--recompute-granularity full` with its method `block`.

Megatron's machinery for it takes its own default for a sign of fp8 and fails without Transformer Engine, and gives an
output without a gradient where the layer's input needs none (a frozen embedding); both are put right.

With `--recompute-norm-num-layers N` that holds for the first N layers of each pipeline rank.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from mindspeed_lite.engine import Feature, Session

from ._shared import recompute

SWITCH = recompute.Switch(
    "recompute_norm", help="Release the norms of a layer after use and compute them again in the backward pass."
)


def prepare(layer: Any, session: Session) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    # Norms that are part of the linear layer behind them have an empty module in their place.
    for name, checkpoint in (
        ("input_layernorm", "input_layernorm_checkpoint"),
        ("pre_mlp_layernorm", "pre_mlp_norm_checkpoint"),
    ):
        switch = f"recompute_{name}"
        if not getattr(layer, switch, False):
            # Megatron keeps the last checkpoint in the layer; a backward pass to come has its own hold on it.
            session.on_end(functools.partial(_forget, weakref.ref(layer), checkpoint))
        session.mark(layer, switch, not isinstance(getattr(layer, name), IdentityOp))


def _forget(layer: weakref.ref[Any], name: str) -> None:
    found = layer()
    if found is not None:
        vars(found).pop(name, None)


FEATURE = Feature(
    name=SWITCH.feature,
    summary="a layer's norms released after use and recomputed",
    options=SWITCH.options,
    enabled=SWITCH.enabled,
    numerics="ulp",
    theme="memory",
    condition=SWITCH.why_not,
    conflicting_args=recompute.CONFLICTING_ARGS,
    not_auto=recompute.NOT_AUTO,
    patches=(
        SWITCH.in_chosen_layers(
            prepare,
            ("input_layernorm", "pre_mlp_layernorm", "recompute_input_layernorm", "recompute_pre_mlp_layernorm"),
        ),
        *recompute.CHECKPOINT_PATCHES,
    ),
)
