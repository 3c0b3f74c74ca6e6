"""`--use-fused-l2norm` in real Megatron: output and gradient beside float64, its reason, and what it keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import use_fused_l2norm as patch
from tests.harness.compare import assert_not_worse, error
from tests.harness.process_groups import start
from tests.harness.processes import forked


def run(x, dy):
    """Output and gradient of Megatron's module for [s, b, heads, d]."""
    from megatron.core.transformer.torch_norm import L2Norm

    leaf = x.detach().requires_grad_()
    y = L2Norm(hidden_size=x.size(-1), eps=1e-5)(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy)]


def definition(x, dy):
    leaf = x.double().requires_grad_()
    y = leaf * torch.rsqrt(leaf.pow(2).mean(-1, keepdim=True) + 1e-5)
    return [y.detach(), *torch.autograd.grad(y, leaf, dy.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@forked("megatron")
def test_output_and_gradient_are_as_near_to_float64_as_megatrons(dtype):
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(9, 2, 4, 64, generator=generator).to(dtype) for _ in range(2))
    off, saved = run(x, dy), []
    with mindspeed_lite.enabled(use_fused_l2norm=True, strict=True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            on = run(x, dy)
        again = run(x.clone(), dy)
    assert_not_worse(on, off, definition(x, dy), 2 * torch.finfo(dtype).eps, ["y", "dx"])
    assert all(torch.equal(a, b) for a, b in zip(on, again, strict=True))
    # Its input, the weight of ones, and a number per row at most.
    assert sum(each.numel() for each in saved) <= x.numel() + 64 + x.numel() // 64
    assert all(torch.equal(a, b) for a, b in zip(run(x, dy), off, strict=True))


def steps():
    """Output and gradients of a transformer block whose queries and keys are normalised."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not torch.distributed.is_initialized():
        start()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, qk_l2_norm=True, attention_dropout=0.0, hidden_dropout=0.0
    )
    block = TransformerBlock(config=config, spec=get_gpt_layer_local_spec(qk_l2_norm=True), post_layer_norm=False)
    x = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    out = block(x, attention_mask=None)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(each.grad for each in block.parameters())]


@forked("megatron")
def test_a_model_with_the_norm_gives_the_same_on_and_off():
    off = steps()
    with mindspeed_lite.enabled(use_fused_l2norm=True, strict=True):
        on = steps()
    assert all(error(a, b) < 1e-5 for a, b in zip(on, off, strict=True))


def test_a_model_without_the_norm_is_a_reason():
    context = Context(Settings({}), "cpu", {}, SimpleNamespace(qk_l2_norm=False))
    assert "--qk-l2-norm" in patch.FEATURE.condition(context)[0]
