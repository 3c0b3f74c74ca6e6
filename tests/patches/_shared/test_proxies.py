"""Stand-ins hold what they are given, and nothing of their own."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import torch

from mindspeed_lite.patches._shared.proxies import AttributeOverride, LinearCall, seen
from mindspeed_lite.patches.moe_zero_memory import release_mlp


def test_it_can_be_copied():
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        found = copied(AttributeOverride(SimpleNamespace(a=1, b=[2]), a=5))
        assert (found.a, found.b) == (5, [2])


def test_a_call_is_seen_once_and_leaves_no_hook() -> None:
    layer = torch.nn.Linear(3, 2)
    # As Megatron's, it returns its bias apart.
    layer.forward = lambda x: (torch.nn.functional.linear(x, layer.weight), None)  # type: ignore[method-assign]
    x = torch.ones(4, 3)
    call = LinearCall()
    with seen(layer, call):
        y, _ = layer(x)
    assert call.input is x and call.output is y
    layer(torch.zeros(4, 3))
    assert call.input is x and not layer._forward_hooks


def test_what_is_no_intermediate_of_its_own_is_kept() -> None:
    first, second = LinearCall(), LinearCall()
    release_mlp(None, first, second, True)  # nothing has run
    x = torch.ones(4, 3, requires_grad=True)
    first.input, first.output = x, x * 2
    # An activation in place: one storage.
    second.input = first.output.view(4, 3)
    second.output = second.input * 3
    release_mlp(None, first, second, True)
    assert second.input.untyped_storage().nbytes() == 4 * 3 * 4
    second.input = torch.nn.functional.silu(first.output)
    second.output = second.input.detach() * 3
    release_mlp(None, first, second, True)
    assert second.input.untyped_storage().nbytes() == 4 * 3 * 4, "without a backward pass nothing would come back"
