"""masked_softmax on NPUs: our calls of torch_npu, on the emulation of its documentation (see twin)."""

from __future__ import annotations

import sys

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.masked_softmax import masked_softmax, why_not
from tests.harness.compare import assert_not_worse, forward_backward
from tests.harness.masked_softmax import DTYPES, MASKS, SLACK, hidden, make, megatron

from . import twin


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_not_above_that_of_megatron(
    npu_twin: list[twin.Call], dtype: torch.dtype, kind: str, causal: bool
) -> None:
    for shape, scale, size in (((2, 3, 32, 32), 1.0, 2.0), ((1, 2, 96, 96), 0.125, 30.0)):
        if dtype == torch.float16:
            scale = 1.0
        scores, mask, dprobs = make(shape, dtype, kind, size=size)
        # What is made of a row in which everything is hidden is another thing: here it sees every key.
        unseen = hidden(scores, mask, causal)
        unseen &= ~unseen.all(-1, keepdim=True)
        with force("masked_softmax", "npu"):
            got = forward_backward(
                lambda x: masked_softmax(x, mask, causal=causal, scale=scale),  # noqa: B023
                [scores],
                dprobs,
            )

        def theirs(x: torch.Tensor) -> torch.Tensor:
            return megatron(x, unseen, False, scale)  # noqa: B023

        assert_not_worse(
            got,
            forward_backward(theirs, [scores], dprobs),
            forward_backward(theirs, [scores], dprobs, torch.float64),
            SLACK,
            ("probs", "dscores"),
        )
        assert got[0].isfinite().all() and got[1].isfinite().all()
    assert [call.function for call in npu_twin] == ["npu_scaled_masked_softmax"] * 2


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
