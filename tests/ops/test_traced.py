"""Which tensors a kernel that is handed addresses may be called with."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lite.ops.traced import NoMemoryError, addresses, is_traced


def test_tensors_with_memory_are_computed_and_others_are_traced():
    x = torch.zeros(2)
    assert not is_traced(x) and not is_traced(torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert is_traced(mode.from_tensor(x))


def test_released_memory_among_many_tensors_is_found():
    tensors = [torch.zeros(4) for _ in range(3)]
    assert addresses(tensors) == tuple(each.data_ptr() for each in tensors) and addresses([]) == ()
    part = tensors[1][2:]
    part.untyped_storage().resize_(0)
    with pytest.raises(NoMemoryError, match="memory is released"):
        addresses([tensors[0], part, tensors[2]])


def test_a_compiler_sees_through():
    seen = []

    def function(x):
        seen.append(is_traced(x))
        return x + 1

    torch.compile(function, backend="eager", fullgraph=False)(torch.zeros(2))
    assert seen == [True]
