"""masked_softmax on NPUs: our calls of torch_npu, on the emulation of its documentation (see twin)."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.masked_softmax import masked_softmax, why_not

from . import twin
from .compare import assert_not_worse, forward_backward
from .test_masked_softmax import DTYPES, MASKS, SLACK, make, megatron


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_not_above_that_of_megatron(
    npu_twin: list[twin.Call], dtype: torch.dtype, kind: str, causal: bool
) -> None:
    for shape, scale, size in (((2, 3, 32, 32), 1.0, 2.0), ((1, 2, 96, 96), 0.125, 30.0)):
        scores, mask, dprobs = make(shape, dtype, kind, size=size)
        with force("masked_softmax", "npu"):
            got = forward_backward(
                lambda x: masked_softmax(x, mask, causal=causal, scale=scale),  # noqa: B023
                [scores],
                dprobs,
            )

        def theirs(x: torch.Tensor) -> torch.Tensor:
            return megatron(x, mask, causal, scale)  # noqa: B023

        assert_not_worse(
            got,
            forward_backward(theirs, [scores], dprobs),
            forward_backward(theirs, [scores], dprobs, torch.float64),
            SLACK,
            ("probs", "dscores"),
        )
    assert [call.function for call in npu_twin] == ["npu_scaled_masked_softmax"] * 2


def test_the_mask_is_made_once_and_a_mask_that_fits_is_not_copied(npu_twin: list[twin.Call]) -> None:
    scores, mask, _ = make((2, 3, 32, 64), torch.float32, "b1qk")
    square = scores[..., :32].contiguous()
    with force("masked_softmax", "npu"):
        for _ in range(2):
            masked_softmax(square, causal=True)
        masked_softmax(square)
        masked_softmax(square, causal=True)
        masked_softmax(scores, mask)
    masks = [call.args[1] for call in npu_twin]
    assert masks[0].data_ptr() == masks[1].data_ptr() and masks[0].shape == (1, 1, 32, 32)
    assert torch.equal(masks[0], masks[3]) and not masks[2].any()
    assert mask is not None and masks[4].data_ptr() == mask.data_ptr()


@pytest.mark.usefixtures("npu_twin")
def test_other_lengths_and_dtypes_are_refused_by_name() -> None:
    with force("masked_softmax", "npu"):
        for queries, keys in ((33, 33), (1, 64), (64, 4128), (0, 0)):
            (said,) = why_not(torch.zeros(1, 1, queries, keys))
            assert "32, 64, 96" in said
        (said,) = why_not(torch.zeros(1, 1, 32, 32, dtype=torch.float64))
        assert "float64" in said
        assert why_not(torch.zeros(1, 1, 4096, 32)) == []
