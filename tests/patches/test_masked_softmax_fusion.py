"""`--masked-softmax-fusion` in Megatron's own attention: the same probabilities, and what is left to Megatron."""

from __future__ import annotations

import torch

import mindspeed_lite
from mindspeed_lite import platform
from tests.harness.processes import forked

ON = "use_masked_softmax_fusion"


def softmax_of(causal=True, dtype=torch.bfloat16, fusion=True, scale=None, **fields):
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    return FusedScaleMaskSoftmax(
        **{
            "input_in_fp16": dtype == torch.float16,
            "input_in_bf16": dtype == torch.bfloat16,
            "attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.padding,
            "scaled_masked_softmax_fusion": fusion,
            "mask_func": attention_mask_func,
            "softmax_in_fp32": True,
            "scale": scale,
            **fields,
        }
    )


def run(softmax, scores, dy, mask=None):
    leaf = scores.detach().requires_grad_()
    # Not the leaf itself, which Megatron could not mask in place.
    probs = softmax(leaf * 1, mask)
    return [probs.detach(), *torch.autograd.grad(probs, leaf, dy)]


def tensors(queries=24, keys=24):
    generator = torch.Generator().manual_seed(2)
    scores, dy = (torch.randn(2, 4, queries, keys, generator=generator).mul_(4).bfloat16() for _ in range(2))
    return scores, dy, torch.rand(2, 1, queries, keys, generator=generator) < 0.3


@forked("megatron")
def test_what_it_does_not_serve_is_megatrons_without_the_extension():
    platform.activate()
    scores, dy, mask = tensors()
    cases = {
        "window": (softmax_of(window_size=(4, 0)), softmax_of(window_size=(4, 0), fusion=False), None),
        "float64": (softmax_of(dtype=torch.float64), softmax_of(dtype=torch.float64, fusion=False), None),
        "masking function": (
            softmax_of(False, mask_func=lambda scores, mask: scores.masked_fill(mask, -1e4)),
            softmax_of(False, fusion=False),
            mask,
        ),
    }
    for word, (ours, theirs, given) in cases.items():
        inputs = [each.double() if word == "float64" else each for each in (scores, dy)]
        off = run(theirs, *inputs, given)
        with mindspeed_lite.enabled(**{ON: True}):
            on = run(ours, *inputs, given)
            (said,) = mindspeed_lite.report().fallbacks
        assert word in said.reason and all(torch.equal(a, b) for a, b in zip(on, off, strict=True))
    with mindspeed_lite.enabled(**{ON: True}):
        offset = softmax_of()(scores, None, torch.zeros(4))
        (said,) = mindspeed_lite.report().fallbacks
    assert "offset" in said.reason
    with mindspeed_lite.enabled(**{ON: True, "verify": 1, "strict": True}):
        unfused = softmax_of(fusion=False, window_size=(4, 0))
        assert torch.equal(unfused(scores * 1, None), softmax_of(fusion=False, window_size=(4, 0))(scores * 1, None))
        assert not mindspeed_lite.report().verifications, "a configuration without the fusion"
    assert torch.equal(offset, softmax_of(fusion=False)(scores, None, torch.zeros(4)))
