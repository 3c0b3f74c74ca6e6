"""`--masked-softmax-fusion`: a configuration without the fusion. `test_calls.py` has the calls that it serves."""

from __future__ import annotations

import torch

import mindspeed_lite
from tests.harness.processes import forked
from tests.patches.test_calls import masked_softmax


@forked("megatron")
def test_a_configuration_without_the_fusion_is_left_alone():
    mindspeed_lite.enable()
    unfused = masked_softmax(scaled_masked_softmax_fusion=False, window_size=(4, 0))
    off = unfused()
    with mindspeed_lite.enabled(use_masked_softmax_fusion=True, verify=1, strict=True):
        assert torch.equal(unfused(), off) and not mindspeed_lite.report().verifications
