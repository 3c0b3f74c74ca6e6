"""`--moe-permute-fusion` in real Megatron: three functions, fused and not, and the configuration that asks."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import OptionError
from tests.harness.compare import error
from tests.harness.processes import forked

ON = {"moe_permute_fusion": True, "strict": True}
T, H, E, K = 24, 16, 6, 2


def routed(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    scores = torch.rand(T, E, generator=generator)
    chosen = scores.topk(K, dim=1).indices
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(1, chosen, True)
    return tokens, routing_map, (scores * routing_map).requires_grad_()


def there_and_back(fused, drop_and_pad):
    """Tokens to their experts, weighted there, and back; all that comes out, and the gradients."""
    from megatron.core.transformer.moe import moe_utils

    tokens, routing_map, probs = routed()
    count = E * 5 if drop_and_pad else T * K
    permuted, weights, rows, *_ = moe_utils.permute(
        tokens, routing_map, probs=probs, num_out_tokens=count, fused=fused, drop_and_pad=drop_and_pad
    )
    back = moe_utils.unpermute(
        (permuted * weights.unsqueeze(-1)).bfloat16(), rows, tokens.shape, routing_map=routing_map, fused=fused,
        drop_and_pad=drop_and_pad,
    )  # fmt: skip
    back.backward(torch.randn(back.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    return permuted.detach(), weights.detach(), back.detach(), tokens.grad, probs.grad


@pytest.mark.parametrize("drop_and_pad", [False, True])
@forked("megatron")
def test_tokens_go_where_megatron_sends_them(drop_and_pad):
    off = there_and_back(False, drop_and_pad)
    with pytest.raises(ValueError, match="TE"):
        there_and_back(True, drop_and_pad)
    with mindspeed_lite.enabled(**ON):
        on = there_and_back(True, drop_and_pad)
        plain = there_and_back(False, drop_and_pad)
    assert all(torch.equal(a, b) for a, b in zip(plain, off, strict=True)), "only the fused form is reached"
    assert torch.equal(on[0], off[0]) and torch.equal(on[1], off[1]), "the same rows in the same order"
    for got, want in zip(on, off, strict=True):
        assert got.dtype == want.dtype and error(got, want.double()) <= 2**-7


@pytest.mark.parametrize("with_probs", [False, True])
@forked("megatron")
def test_chunks_are_sorted(with_probs):
    from megatron.core.transformer.moe import moe_utils

    sizes, order = torch.tensor([3, 0, 4, 1]), torch.tensor([2, 0, 3, 1])
    x = torch.randn(8, H)
    probs = torch.rand(8) if with_probs else None
    off = moe_utils.sort_chunks_by_idxs(x, sizes, order, probs=probs)
    with mindspeed_lite.enabled(**ON):
        on = moe_utils.sort_chunks_by_idxs(x, sizes, order, probs=probs, fused=True)
    assert torch.equal(on[0], off[0])
    assert (on[1] is None and off[1] is None) or torch.equal(on[1], off[1])


@forked("megatron")
def test_the_configuration_takes_the_flag_only_while_it_is_on():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    given = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "moe_permute_fusion": True}
    with pytest.raises(ValueError, match="fused permutation"):
        TransformerConfig(**given)
    with mindspeed_lite.enabled(**ON):
        assert TransformerConfig(**given).moe_permute_fusion
        # What only Transformer Engine has is an error that says so.
        tokens, routing_map, probs = routed()
        counts = routing_map.sum(0)
        with pytest.raises(ValueError, match=r"requires TE|install TE"):
            moe_utils.permute(tokens, routing_map, probs, T * K, True, False, counts, 16)
        # With an old Transformer Engine, which lacks these functions, Megatron calls what is supplied.
        moe_utils.HAVE_TE = True
        with pytest.raises(OptionError, match=r"^moe_permute_fusion: .* leave --moe-permute-fusion out\.$"):
            moe_utils.permute(tokens, routing_map, probs, T * K, True, False, counts, 16)
    assert moe_utils.fused_permute is None
