"""Megatron's MLP around linear layers that do nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

WIDTH = 24
# What each model's MLP computes: fields of its configuration, whether fc1 has a bias, whether tokens have weights.
MODELS = {
    "swiglu": ({"activation": "silu", "gated_linear_unit": True}, False, False),
    "swiglu with bias": ({"activation": "silu", "gated_linear_unit": True}, True, False),
    "swiglu of an expert": ({"activation": "silu", "gated_linear_unit": True}, False, True),
    "geglu": ({"activation": "gelu", "gated_linear_unit": True}, False, False),
    "geglu with bias": ({"activation": "gelu", "gated_linear_unit": True}, True, False),
    "quick_geglu of an expert": (
        {"activation": "quick_gelu", "gated_linear_unit": True, "glu_linear_offset": 1.0}, True, True,
    ),
    "quick_geglu of an expert, clamped": (
        {"activation": "quick_gelu", "gated_linear_unit": True, "activation_func_clamp_value": 0.5}, False, True,
    ),
    "gelu with bias": ({"activation": "gelu", "gated_linear_unit": False}, True, False),
    "squared_relu": ({"activation": "squared_relu", "bias_activation_fusion": False}, True, False),
    "squared_relu of an expert": ({"activation": "squared_relu", "bias_activation_fusion": False}, False, True),
}  # fmt: skip


class Linear(torch.nn.Module):
    """Stands for fc1 and fc2: hands on what it gets, and a bias beside it."""

    def __init__(self, bias=None):
        super().__init__()
        self.bias = bias

    def forward(self, x):
        return x, self.bias


def mlp_of(fields, bias=None):
    """Megatron's MLP, whose forward is all that counts here, around linears that do nothing."""
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP

    functions = {"silu": F.silu, "gelu": F.gelu, "squared_relu": activations.squared_relu,
                 "quick_gelu": fused_bias_geglu.quick_gelu}  # fmt: skip
    fields = {"bias_activation_fusion": True, **fields}
    name = fields.pop("activation")
    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=4, activation_func=functions[name],
        add_bias_linear=bias is not None, **fields,
    )  # fmt: skip
    mlp.activation_func = mlp.config.activation_func
    mlp.linear_fc1, mlp.linear_fc2 = Linear(bias), Linear()
    return mlp
