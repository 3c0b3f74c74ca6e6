"""What the planner says that the fused output layer and loss keeps of its logits is what the operator keeps."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.linear_cross_entropy import chunks
from mindspeed_lite.planner import activations


@pytest.mark.parametrize(
    ("rows", "width", "itemsize"),
    [(4096, 32768, 2), (4096, 32832, 2), (5000, 50257, 2), (16384, 32768, 2), (16385, 32768, 2), (3, 10, 4)],
)
def test_the_planner_keeps_what_the_operator_keeps(rows: int, width: int, itemsize: int) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    parts = chunks._parts(rows, torch.empty(width, 1, dtype=dtype), keeps=True)
    assert activations._kept(rows * width * itemsize, rows * itemsize) == parts.kept * rows * itemsize
    assert 0 <= parts.kept * rows * itemsize <= chunks.KEPT_BYTES
