"""The norms that Megatron's local implementation makes."""

from __future__ import annotations

HIDDEN = 48


def config_of(**fields):
    from megatron.core.transformer import TransformerConfig

    normalization = fields.pop("normalization", "RMSNorm")
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, normalization=normalization, **fields
    )


def norm_of(eps=1e-5, **fields):
    """The norm that Megatron's local implementation makes for a configuration with these fields."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return WrappedTorchNorm(config=config_of(**fields), hidden_size=HIDDEN, eps=eps)
