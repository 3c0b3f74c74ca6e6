"""`--use-fused-l2norm` in real Megatron: what it keeps for the backward pass."""

from __future__ import annotations

import torch

import mindspeed_lite
from tests.harness.processes import forked


@forked("megatron")
def test_it_keeps_its_input_a_weight_of_ones_and_a_number_per_row_at_most():
    from megatron.core.transformer.torch_norm import L2Norm

    x, saved = torch.randn(9, 2, 4, 64, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with mindspeed_lite.enabled(use_fused_l2norm=True, strict=True), hooks:
        L2Norm(hidden_size=64, eps=1e-5)(x)
    assert sum(each.numel() for each in saved) <= x.numel() + 64 + x.numel() // 64
