"""Two steps of a tiny GPT that Megatron-Bridge's provider builds and wraps, with Transformer Engine's layers.

    PYTHONPATH=. torchrun --nproc-per-node 1 megatron_bridge_steps.py

Needs Megatron-Bridge 0.6.2, Transformer Engine. Without features: MINDSPEED_LITE_FEATURES=off.
"""

from __future__ import annotations

import os

import mindspeed_lite.megatron_adaptor  # noqa: F401  on a CPU, its device layer

if os.environ.get("MINDSPEED_LITE_FEATURES") != "off":
    import mindspeed_lite_plugin  # noqa: F401

import few_steps
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.distributed import DistributedDataParallelConfig

if __name__ == "__main__":
    few_steps.start()
    provider = GPTModelProvider(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        vocab_size=few_steps.VOCABULARY, seq_length=few_steps.SEQUENCE, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
    )  # fmt: skip
    provider.finalize()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    models = provider.provide_distributed_model(ddp)
    few_steps.train(models, models[0].config)
