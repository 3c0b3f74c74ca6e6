"""masked_softmax on NPUs: our calls of torch_npu, on the emulation of its documentation (see twin)."""

from __future__ import annotations

import sys

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.masked_softmax import masked_softmax, why_not

from . import twin


def test_masks_that_are_not_given_are_made_once_and_few_are_kept(npu_twin: list[twin.Call]) -> None:
    scores = torch.zeros(2, 3, 32, 32)
    with force("masked_softmax", "npu"):
        for _ in range(3):
            masked_softmax(scores, causal=True)
            masked_softmax(scores)
            masked_softmax(torch.zeros(2, 3, 64, 64), causal=True)
        masks = [call.args[1] for call in npu_twin]
        assert masks[0].shape == (1, 1, 32, 32) and masks[0].sum() == 32 * 31 // 2 and not masks[1].any()
        assert len({mask.data_ptr() for mask in masks}) == 3, "whatever comes between"
        for size in range(96, 1024, 32):
            masked_softmax(torch.zeros(1, 1, size, size), causal=True)
    kept = sys.modules["mindspeed_lite.ops.masked_softmax.npu"]._masks
    assert len(kept) == 4


@pytest.mark.usefixtures("npu_twin")
def test_other_lengths_and_dtypes_are_refused_by_name() -> None:
    with force("masked_softmax", "npu"):
        for queries, keys in ((33, 33), (1, 64), (64, 4128), (0, 0)):
            (said,) = why_not(torch.zeros(1, 1, queries, keys))
            assert "32, 64, 96" in said
        (said,) = why_not(torch.zeros(1, 1, 32, 32, dtype=torch.float16), scale=2.0)
        assert "overflow" in said and why_not(torch.zeros(1, 1, 32, 32, dtype=torch.float16)) == []
        (said,) = why_not(torch.zeros(1, 1, 32, 32, dtype=torch.float64))
        assert "float64" in said
        assert why_not(torch.zeros(1, 1, 4096, 32)) == []
