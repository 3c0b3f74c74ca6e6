"""Weight gradients of Transformer Engine's linear layers, computed where a schedule or a stream takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_lite.patches._shared import linear_layers
from tests.te_contract.conftest import STAND_IN


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_gradients_wait_until_they_are_computed(imported: Callable[[Path], Any], kind: str) -> None:
    te = imported(STAND_IN)
    make = functools.partial(te.GroupedLinear, 2) if kind == "GroupedLinear" else getattr(te, kind)
    layers = [make(8, 6, device="cpu", fuse_wgrad_accumulation=True) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    rest = (torch.tensor([2, 3]),) if kind == "GroupedLinear" else ()
    jobs: list[Callable[[], None]] = []
    ends: list[Callable[[], object]] = []
    session: Any = SimpleNamespace(mark=setattr, on_end=ends.append)
    linear_layers.take_gradients(session, layers[0], jobs.append)

    def backward(layer: Any) -> None:
        torch.manual_seed(1)
        layer(torch.randn(5, 8), *rest).square().sum().backward()
        for param in layer.parameters():
            # Megatron's hook, which autograd calls for the second layer and the schedule for the first.
            if param.grad is not None and not param.grad_added_to_main_grad:
                param.main_grad.add_(param.grad)
            param.grad, param.grad_added_to_main_grad = None, False

    for param in (each for layer in layers for each in layer.parameters()):
        param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
    for layer in layers:
        backward(layer)
        backward(layer)
    late = linear_layers.delayed_parameters(layers[0])
    assert len(jobs) == 2 and [*linear_layers.te_layers(torch.nn.Sequential(*layers))] == layers
    assert len(late) == (4 if rest else 2) and not any(param.main_grad.any() for param in late)
    for job in jobs:
        job()
    found, expected = ([param.main_grad for param in layer.parameters()] for layer in layers)
    assert all(map(torch.equal, found, expected)) and all(each.any() for each in found)
    for end in ends:
        end()
    backward(layers[0])
    assert len(jobs) == 2


def test_where_gradients_cannot_wait(imported: Callable[[Path], Any]) -> None:
    te = imported(STAND_IN)
    layer = te.Linear(8, 6, device="cpu")
    layer.config = SimpleNamespace(fp8="hybrid")
    assert "no gradient_accumulation_fusion" in linear_layers.why_not(layer)
    layer.fuse_wgrad_accumulation = True
    assert "in fp8" in linear_layers.why_not(layer)
    layer.apply_bias = False
    assert linear_layers.why_not(layer) == "" and linear_layers.delayed_parameters(layer) == [layer.weight]
