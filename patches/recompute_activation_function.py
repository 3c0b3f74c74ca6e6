"""`--recompute-activation-function`: release the MLP activation's output and recompute it.

Reaches every MLP: dense, experts and shared experts, and Transformer Engine's grouped experts. The output
[s, b, ffn / TP] is freed after the second linear layer and recomputed in its backward by Megatron's
`CheckpointWithoutOutput`, without a GEMM.
`--recompute-activation-function-num-layers N` limits it to the first N layers of each pipeline rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_lite.engine import Around, Function, Override, Session
from mindspeed_lite.platform.megatron import CONFIG

from ._shared import recompute
from ._shared.proxies import RECOMPUTED, run_activation

_OBSERVERS = "activation_observers"
_SWITCH = "activation_recompute"


def is_recomputed(mlp: Any, session: Session) -> bool:
    chosen = getattr(mlp, RECOMPUTED, False) and torch.is_grad_enabled()
    return chosen and not recompute.is_checkpointed(FEATURE.name, session)


def observe(mlp: Any, enter: Callable[[Any], None], leave: Callable[[Any], None]) -> Callable[[], None]:
    """Call `enter` and `leave` on the activation's input and output; return the undo."""

    def end() -> None:
        vars(mlp).pop(_OBSERVERS, None)
        for handle in handles:
            handle.remove()

    # Grouped experts run no hooks and call `run_observed`.
    handles = (
        mlp.linear_fc1.register_forward_hook(lambda _, args, out: enter(out[0])),
        mlp.linear_fc2.register_forward_pre_hook(lambda _, args: leave(args[0])),
    )
    vars(mlp)[_OBSERVERS] = (enter, leave)
    return end


def run_observed(mlp: Any, activation: Function, x: Any, *rest: Any) -> Any:
    """`activation(x, *rest)`, observed by the observers of this MLP."""
    enter, leave = vars(mlp).get(_OBSERVERS, (None, None))
    if enter is None:
        return activation(x, *rest)
    enter(x)
    y = activation(x, *rest)
    leave(y)
    return y


def prepare(layer: Any, session: Session) -> None:
    from megatron.core.transformer.mlp import MLP

    mlp, modules = layer.mlp, layer.config.recompute_modules or ()
    selective = layer.config.recompute_granularity == "selective"
    # Fully recomputed modules keep nothing to release.
    if isinstance(mlp, MLP):
        session.mark(mlp, RECOMPUTED, not (selective and "mlp" in modules))
    elif not (selective and "moe" in modules):
        experts = getattr(mlp, "experts", None)
        # Grouped experts have a switch for it, before 0.17 also those without layers.
        is_grouped = hasattr(experts, _SWITCH)
        if is_grouped and not hasattr(experts, "linear_fc2"):
            session.fallback(FEATURE.name, "Megatron's grouped experts of before 0.17 keep their activation")
        else:
            for expert in [experts] if is_grouped else getattr(experts, "local_experts", ()):
                session.mark(expert, RECOMPUTED, True)
        shared = getattr(mlp, "shared_experts", None)
        if shared is not None and layer.config.moe_shared_expert_overlap:
            session.fallback(FEATURE.name, "shared experts that overlap communication keep their activation")
        elif shared is not None:
            session.mark(shared, RECOMPUTED, not (selective and "shared_experts" in modules))


def _forward(wrapped: Function, session: Session) -> Function:
    def forward(self: Any, hidden_states: Any, per_token_scale: Any = None, **kwargs: Any) -> Any:
        # Transformer Engine has an empty tensor for none.
        added = getattr(self.linear_fc2, "bias", None)
        biased = per_token_scale is not None and added is not None and added.numel() > 0
        recomputes = is_recomputed(self, session)
        if not recomputes or biased:
            if biased and recomputes:
                session.fallback(FEATURE.name, "an expert's second layer has a bias, which Megatron adds in place")
            return wrapped(self, hidden_states, per_token_scale, **kwargs)
        x, bias = self.linear_fc1(hidden_states)
        given = {"bias": bias, "scale": per_token_scale}
        names = [name for name, tensor in given.items() if tensor is not None]

        def activation(x: Any, *rest: Any) -> Any:
            others = dict(zip(names, rest, strict=True))
            return run_activation(wrapped, self, x, others.get("scale"), bias=others.get("bias"), **kwargs)

        checkpoint = recompute.checkpoint_without_output()
        y = checkpoint.checkpoint(activation, x, *(given[name] for name in names))
        output, output_bias = self.linear_fc2(y)
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias

    return forward


@contextlib.contextmanager
def grouped_activation(experts: Any, is_recomputed: bool = True) -> Iterator[None]:
    """Let Megatron's grouped experts recompute the activation, as with `--recompute-modules moe_act`."""
    before = experts.activation_recompute
    experts.activation_recompute = before or is_recomputed
    try:
        yield
    finally:
        experts.activation_recompute = before


def _grouped(wrapped: Function, session: Session) -> Function:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with grouped_activation(self, is_recomputed(self, session)):
            return wrapped(self, *args, **kwargs)

    return forward


# For features that mark an MLP with `RECOMPUTED`.
MLP_PATCHES = (
    Override("megatron.core.transformer.mlp:MLP.forward", _forward, by_name=True),
    Around("megatron.core.transformer.moe.experts:TEGroupedMLP.forward", _grouped, reads=(_SWITCH,), versions=">=0.16"),
)
FEATURE = recompute.feature_of_layers(
    "recompute_activation_function",
    summary="the MLP's activation released after use and recomputed",
    numerics="bitwise",
    theme="memory",
    prepare=prepare,
    reads=("mlp", f"{CONFIG}.recompute_modules", f"{CONFIG}.moe_shared_expert_overlap"),
    patches=MLP_PATCHES,
)
