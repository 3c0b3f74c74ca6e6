"""Modules and functions of Transformer Engine for PyTorch."""

from . import cpu_offload, cpu_offload_v1, distributed, ops, optimizers, tensor
from .attention import DotProductAttention
from .cross_entropy import parallel_cross_entropy
from .distributed import CudaRNGStatesTracker, checkpoint
from .module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
from .permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "cpu_offload",
    "cpu_offload_v1",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "quantized_model_init",
    "tensor",
]
