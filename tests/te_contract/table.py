"""Which features train with Transformer Engine's layers, and which leave the work to them."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Feature, OptionError, Settings
from tests.harness import feature_layouts

# Trained by `test_scripts`, or on an NPU alone.
SCRIPTS = {"balance_sequence_lengths", "moe_tp_extend_ep", "use_fused_linear_log_prob"}
NPU = {"moe_alltoall_mc2", "use_ascend_mc2"}


def quantized(feature: Feature) -> list[str]:
    """Why a feature leaves trainings with quantized layers, and with weights that are kept so, alone."""
    given = [{"fp8": "hybrid"}, {"fp4": "e2m1"}, {"fp8_param_gather": True}, {"fp4_param_gather": True}]
    return list(dict.fromkeys(why for each in given for why in feature.conflict_reasons(each.get)))


@functools.cache
def own_reasons(name: str, layout: str) -> list[str]:
    """Why a feature, or one that it requires, leaves the work to Transformer Engine."""
    feature = runtime.catalogue()[name]
    args = {**feature_layouts.host_args(layout), "transformer_impl": "transformer_engine"}
    settings = Settings.of((*runtime.GENERAL, *runtime.catalogue().options()), feature_layouts.flags_of(feature))
    context = Context(settings, "cpu", {}, SimpleNamespace(**args))
    with feature_layouts.emulated_devices():
        free = {each.feature for each in feature.requires if each.unless is not None and each.unless(context)}
        for each in reversed(feature_layouts.company(name)):
            if each.name in free:
                continue
            # A layout that the feature does not fit says nothing of Transformer Engine.
            with contextlib.suppress(OptionError):
                reasons = each.condition(context) if each.condition is not None else []
                if own := [reason for reason in reasons if reason.startswith("--transformer-impl transformer_engine")]:
                    return own
    return []
