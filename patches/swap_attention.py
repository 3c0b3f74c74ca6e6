"""`--swap-attention`: offload activations of chosen modules until the backward pass.

Saved tensors of `--swap-modules` go to pinned host memory during the next layer, and are prefetched in backward. The
last layer stays on the device. `--swap-attention-budget` limits host memory. Reaches `TransformerBlock.forward`, which
keeps layer order per pass, and each layer, by saved-tensor hooks. Leaves recomputed layers and outputs alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, OptionError, Session
from mindspeed_lite.memory.copy_engine import CopyEngine as CopyEngine
from mindspeed_lite.memory.hooked_module import HookedModule
from mindspeed_lite.memory.offload import Offload

from ._shared import linear_layers
from ._shared.conditions import config_reasons, cuda_graph_args
from ._shared.wrappers import after_init, forward_pass_patch

_DEFAULT = "input_layernorm,self_attention,pre_mlp_layernorm"
# MindSpeed's name -> Megatron's.
_ALSO = {"input_norm": "input_layernorm", "post_attention_norm": "pre_mlp_layernorm"}
CONFLICTING_ARGS = {
    "cpu_offloading": "--cpu-offloading moves activations itself",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading moves activations itself",
    "hybrid_layer_pattern": "--hybrid-layer-pattern runs layers in another block",
    "hybrid_override_pattern": "--hybrid-override-pattern runs layers in another block",
    "fp8": "--fp8-format saves activations in another form",
    "fp4": "--fp4-format saves activations in another form",
    **cuda_graph_args("replays copies to one place, and each micro-batch has its own in host memory"),
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers in pieces",
}
_keys = itertools.count()


def _names(given: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_ALSO.get(name, name) for name in (each.strip() for each in given.split(",")) if name))
    if not names:
        raise OptionError(f"--swap-modules: `swap_attention` wants names of a layer's modules, such as {_DEFAULT}")
    return names


def _why_not_here(device: str) -> list[str]:
    return [] if device != "cpu" else ["cpu has one memory: what leaves it is no smaller there"]


def _shared(session: Session, device: torch.device) -> Offload:
    def make() -> Offload:
        budget = session.settings.swap_attention_budget
        limit = None if budget is None else int(budget * 2**30)
        return Offload(CopyEngine(device), device.type, limit, session.fallback_of(FEATURE.name))

    return session.state(FEATURE.name, make)


def _chosen(layer: torch.nn.Module, given: str) -> list[torch.nn.Module]:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    modules = []
    for name in _names(given):
        try:
            modules.append(layer.get_submodule(name))
        except AttributeError:
            there = ", ".join(each for each, _ in layer.named_children())
            raise OptionError(
                f"--swap-modules {name}: `swap_attention` finds no such module in a {type(layer).__name__}; there are "
                f"{there}, and those within them, such as self_attention.core_attention"
            ) from None
    return [each for each in modules if not isinstance(each, (IdentityOp, IdentityFuncOp))]


def _hook_layer(session: Session, layer: Any) -> None:
    modules = _chosen(layer, session.settings.swap_modules)
    if reasons := config_reasons(CONFLICTING_ARGS, layer.config):
        session.fallback(FEATURE.name, "; ".join(reasons))
        return
    offload = _shared(session, next(layer.parameters()).device)
    key = next(_keys)
    for hooked in (
        HookedModule(layer, lambda: offload.layer(key, layer.parameters())),
        *(HookedModule(each, offload.saving) for each in modules),
    ):
        for handle in hooked.handles:
            session.on_end(handle.remove)


def _why_not(context: Context) -> list[str]:
    if context.settings.get("swap_attention"):
        _names(context.settings.get("swap_modules") or "")
    reasons = _why_not_here(context.device)
    if context.arg("recompute_granularity", None) == "full" and context.arg("recompute_method", None) != "block":
        reasons.append("--recompute-granularity full keeps nothing within a layer")
    return reasons


FEATURE = Feature(
    name="swap_attention",
    summary="activations of chosen modules in host memory between forward and backward pass",
    options=(
        Option("--swap-attention"),
        Option(
            "--swap-modules",
            help="Which modules of a layer, by name and comma-separated: norms and attention if not given.",
            default=_DEFAULT,
            type=str,
            metavar="NAMES",
        ),
        Option.amount(
            "--swap-attention-budget",
            "Host memory that activations may take; what has no room stays on the device.",
            "GIB",
        ),
    ),
    numerics="bitwise",
    theme="memory",
    condition=_why_not,
    conflicting_args=CONFLICTING_ARGS,
    not_auto="it trades host memory and its link for device memory: enable it explicitly with its flag",
    patches=(
        forward_pass_patch("swap_attention"),
        Around(
            "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            after_init(_hook_layer),
            reads=("config",),
        ),
        linear_layers.PLACEHOLDER_PATCH,
    ),
)
