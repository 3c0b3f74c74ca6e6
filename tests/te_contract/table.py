"""Which features train with Transformer Engine's layers, and which leave the work to them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Feature, OptionError, Settings
from tests.harness import feature_layouts

# Transformer Engine, or Megatron with it, does these itself.
OWN = {
    "context_parallel_algo",
    "delay_wgrad_compute",
    "masked_softmax_fusion",
    "moe_alltoall_mc2",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_wgrad_side_stream",
    "moe_zero_memory",
    "use_ascend_coc",
    "use_ascend_mc2",
    "use_flash_attn",
    "use_fused_layernorm",
    "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb",
}
# Trained by scripts, or on an NPU alone.
SCRIPTS = {
    "balance_sequence_lengths",
    "moe_alltoall_mc2",
    "moe_tp_extend_ep",
    "use_ascend_mc2",
    "use_fused_linear_log_prob",
}


def own_reasons(feature: Feature, layout: str) -> list[str]:
    """Why a feature, or one that it requires, leaves the work to Transformer Engine."""
    args = {**feature_layouts.host_args(layout), "transformer_impl": "transformer_engine"}
    settings = Settings.of((*runtime.GENERAL, *runtime.catalogue().options()), feature_layouts.flags_of(feature))
    context = Context(settings, "cpu", {}, SimpleNamespace(**args))
    with feature_layouts.emulated_devices():
        for each in reversed(feature_layouts.company(feature.name)):
            # A layout that the feature does not fit says nothing of Transformer Engine.
            with contextlib.suppress(OptionError):
                reasons = each.condition(context) if each.condition is not None else []
                if own := [reason for reason in reasons if reason.startswith("--transformer-impl transformer_engine")]:
                    return own
    return []
