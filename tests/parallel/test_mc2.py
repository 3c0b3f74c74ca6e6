"""What CANN's fused products and collectives do not take; `tests/patches/test_use_ascend_mc2.py` runs them."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.parallel import mc2


@pytest.mark.parametrize(
    ("dtype", "summed", "ranks", "reason"),
    [
        (torch.float32, 256, 2, "MC2 takes float16 or bfloat16"),
        (torch.bfloat16, 255, 2, "sums over 255 elements"),
        (torch.bfloat16, 65535, 2, "sums over 65535 elements"),
        (torch.bfloat16, 256, 3, "3 ranks"),
    ],
)
def test_what_it_does_not_take(dtype, summed, ranks, reason):
    x, w = torch.empty(2, summed, dtype=dtype), torch.empty(summed, 2, dtype=dtype)
    (found,) = mc2.why_not(x, w, ranks)
    assert reason in found
    assert mc2.why_not(torch.empty(2, 256).half(), torch.empty(256, 2).half(), 8) == []
