"""Megatron's SequentialMLP with a few experts."""

from __future__ import annotations

import torch

COUNTS = [5, 0, 9, 2]


def experts_of(**fields):
    """SequentialMLP with four experts, as the model's own specification builds it."""
    from functools import partial

    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    values = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": len(COUNTS),
        "moe_ffn_hidden_size": 24,
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.bfloat16, "bf16": True, "moe_grouped_gemm": True, **fields,
    }  # fmt: skip
    config = TransformerConfig(**values)
    built = LocalSpecProvider().grouped_mlp_modules(True)
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp", "tp"])
    torch.manual_seed(3)
    made = (built if isinstance(built, partial) else built[0])(len(COUNTS), config, pg_collection=groups)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for expert in made.local_experts:
        # As with expert parallelism: on one rank Megatron's own experts fail with a bias, added in place to a view.
        expert.linear_fc2.explicit_expert_comm = True
    return made
