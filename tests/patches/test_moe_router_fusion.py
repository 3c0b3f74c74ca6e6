"""`--moe-router-fusion` in real Megatron: the same experts, probabilities and losses as its own code."""

from __future__ import annotations

import itertools

import pytest
import torch

import mindspeed_lite
from tests.harness.compare import error
from tests.harness.processes import forked

ON = {"moe_router_fusion": True, "strict": True}
T, E = 40, 8
ROUTERS = {
    "softmax": {},
    "softmax first": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "sigmoid with bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, E)},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
}


def logits_of(dtype, ties):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    return ((logits * 2).round() / 2 if ties else logits).to(dtype).requires_grad_()


@pytest.mark.parametrize("router", ROUTERS)
@forked("megatron")
def test_choices_are_megatrons(router):
    from megatron.core.transformer.moe import moe_utils

    for dtype, ties in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        results = []
        for fused in (False, True):
            with mindspeed_lite.enabled(**ON):
                logits = logits_of(dtype, ties)
                probs, chosen = moe_utils.topk_routing_with_score_function(logits, 4, fused=fused, **ROUTERS[router])
                (probs.float() * torch.linspace(0, 1, probs.shape[1])).sum().backward()
                results.append((chosen, probs.detach(), logits.grad))
        assert torch.equal(results[0][0], results[1][0]), (dtype, ties)
        for want, got in zip(results[0][1:], results[1][1:], strict=True):
            assert got.dtype == want.dtype and error(got, want.double()) <= 8 * torch.finfo(dtype).eps, (dtype, ties)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padded", [False, True])
@forked("megatron")
def test_the_auxiliary_loss_is_megatrons(score_function, padded):
    from megatron.core.transformer.moe import moe_utils

    padding = torch.arange(T) >= T - 7 if padded else None
    results = []
    for fused in (False, True):
        with mindspeed_lite.enabled(**ON):
            logits = logits_of(torch.float32, False)
            routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(
                logits, 2, score_function, fused=fused, padding_mask=padding
            )
            loss = moe_utils.switch_load_balancing_loss_func(
                probs=scores, tokens_per_expert=routing_map.sum(0), total_num_tokens=T, topk=2, num_experts=E,
                moe_aux_loss_coeff=0.1, fused=fused,
            )  # fmt: skip
            loss.backward()
            results.append((routing_map, scores.detach(), loss.detach(), logits.grad))
    assert torch.equal(results[0][0], results[1][0])
    for want, got in zip(results[0][1:], results[1][1:], strict=True):
        assert got.dtype == want.dtype and error(got, want.double()) <= 1e-5
