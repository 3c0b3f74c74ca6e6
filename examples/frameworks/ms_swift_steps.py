"""Two steps of a tiny Llama that ms-swift's model library, mcore-bridge, builds with Transformer Engine's layers.

    PYTHONPATH=. torchrun --nproc-per-node 1 ms_swift_steps.py

Needs ms-swift 4.6.0, mcore-bridge 1.6.5, Transformer Engine. Without features: MINDSPEED_LITE_FEATURES=off.
"""

from __future__ import annotations

import os

import mindspeed_lite.megatron_adaptor  # noqa: F401  on a CPU, its device layer

if os.environ.get("MINDSPEED_LITE_FEATURES") != "off":
    import mindspeed_lite_plugin  # noqa: F401  the file that `--external_plugins` names

import few_steps
import torch
import transformers
from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
from megatron.core.transformer.module import Float16Module

if __name__ == "__main__":
    few_steps.start()
    llama = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=few_steps.VOCABULARY, max_position_embeddings=few_steps.SEQUENCE,
    )  # fmt: skip
    given = hf_to_mcore_config(llama)
    config = ModelConfig(params_dtype=torch.bfloat16, bf16=True, perform_initialization=True, **given)
    models = [Float16Module(config, model.cuda()) for model in get_mcore_model(config)]
    few_steps.train(few_steps.reduced(models, config), config)
