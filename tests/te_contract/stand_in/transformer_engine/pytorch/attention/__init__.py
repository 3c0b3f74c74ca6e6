"""Attention and rotary embedding."""

from .dot_product_attention import DotProductAttention
from .rope import apply_rotary_pos_emb

__all__ = ["DotProductAttention", "apply_rotary_pos_emb"]
