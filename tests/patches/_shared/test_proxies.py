"""Stand-ins hold what they are given, and nothing of their own."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import torch

from mindspeed_lite.patches._shared.proxies import AttributeOverride, FunctionModule


def test_a_function_is_called_where_a_module_is_asked_for():
    module = FunctionModule(lambda x, scale=1: x * scale)
    assert isinstance(module, torch.nn.Module) and module(2, scale=3) == 6


def test_only_the_attributes_given_differ():
    original = SimpleNamespace(a=1, b=2)
    stand_in = AttributeOverride(original, a=5)
    assert (stand_in.a, stand_in.b, original.a) == (5, 2, 1)
    original.b = 7
    assert stand_in.b == 7


def test_it_can_be_copied():
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        found = copied(AttributeOverride(SimpleNamespace(a=1, b=[2]), a=5))
        assert (found.a, found.b) == (5, [2])
