"""`--masked-softmax-fusion`: a configuration without the fusion. `test_calls.py` has the calls that it serves."""

from __future__ import annotations

import torch

import mindspeed_lite
from tests.harness.processes import forked


@forked("megatron")
def test_a_configuration_without_the_fusion_is_left_alone():
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    mindspeed_lite.enable()
    scores, fused = torch.randn(2, 4, 24, 24).bfloat16(), False
    unfused = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, fused, attention_mask_func, True, 3.0)
    off = unfused(scores * 1, None)
    with mindspeed_lite.enabled(use_masked_softmax_fusion=True, verify=1, strict=True):
        assert torch.equal(unfused(scores * 1, None), off) and not mindspeed_lite.report().verifications
