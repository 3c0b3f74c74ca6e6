"""Which tensors a kernel that is handed addresses may be called with."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lite.ops.traced import is_traced


def test_tensors_with_memory_are_computed_and_others_are_traced():
    x = torch.zeros(2)
    assert not is_traced(x) and not is_traced(torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert is_traced(mode.from_tensor(x))


def test_a_compiler_sees_through():
    seen = []

    def function(x):
        seen.append(is_traced(x))
        return x + 1

    torch.compile(function, backend="eager", fullgraph=False)(torch.zeros(2))
    assert seen == [True]
