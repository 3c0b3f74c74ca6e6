"""Layers with parameters."""

from .grouped_linear import GroupedLinear
from .linear import LayerNormLinear, Linear
from .norm import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
