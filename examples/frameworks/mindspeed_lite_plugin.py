"""Turns features on in processes of a framework that has arguments of its own: verl, ms-swift, a loop of yours.

    VERL_USE_EXTERNAL_MODULES=mindspeed_lite_plugin      verl; this folder on PYTHONPATH, on every node
    megatron sft ... --external_plugins mindspeed_lite_plugin.py      ms-swift

Copy it and choose the features. It waits for megatron.core: a driver or a rollout worker that never does stays as
it is. Where Transformer Engine is absent, mbridge, by which verl builds models, is given Megatron's local layers.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import wrapt

import mindspeed_lite

FEATURES = {
    "use_flash_attn": True,
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "use_fused_adamw": True,
    "use_fused_cross_entropy": True,
}
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@wrapt.when_imported("megatron.core")
def turn_on(module: Any) -> None:
    """Before a model is built, and once: calls of `enable` add up."""
    layers = "transformer_engine" if HAS_TRANSFORMER_ENGINE else "local"
    mindspeed_lite.enable(host_args={"transformer_impl": layers}, **FEATURES)


@wrapt.when_imported("mbridge.core.llm_bridge")
def local_layers(module: Any) -> None:
    """mbridge asks for layers of Transformer Engine, whether there is one or not."""
    original = module.get_gpt_decoder_block_spec

    @functools.wraps(original)
    def get_gpt_decoder_block_spec(config: Any, use_transformer_engine: bool, **more: Any) -> Any:
        return original(config, use_transformer_engine=use_transformer_engine and HAS_TRANSFORMER_ENGINE, **more)

    module.get_gpt_decoder_block_spec = get_gpt_decoder_block_spec


@wrapt.when_imported("mbridge.core.bridge")
def local_names(module: Any) -> None:
    """mbridge knows weights of norms by the names that Transformer Engine's fused layers give them."""
    original = module.Bridge._weight_name_mapping_mcore_to_hf
    fused = {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }

    @functools.wraps(original)
    def _weight_name_mapping_mcore_to_hf(self: Any, mcore_weights_name: str) -> Any:
        try:
            return original(self, mcore_weights_name)
        except NotImplementedError:  # what mbridge raises for a name that it does not know
            for local, other in fused.items():
                mcore_weights_name = mcore_weights_name.replace(local, other)
            return original(self, mcore_weights_name)

    module.Bridge._weight_name_mapping_mcore_to_hf = _weight_name_mapping_mcore_to_hf
