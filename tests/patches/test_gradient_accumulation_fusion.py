"""`--gradient-accumulation-fusion` in real Megatron: what is provided, which linear layers use it, how flags meet."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches import gradient_accumulation_fusion as patch
from tests.harness.compare import error
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches.linear_layers import HIDDEN, config_of

FEATURE = patch.FEATURE
EXTENSION = "fused_weight_gradient_mlp_cuda"
ON = "use_gradient_accumulation_fusion"


def linear_of(kind, fusion, main=torch.float32, **fields):
    from megatron.core import tensor_parallel

    config = config_of(fusion, **fields)
    own = {"gather_output": False} if kind == "ColumnParallelLinear" else {"input_is_parallel": True}
    layer = getattr(tensor_parallel, kind)(
        HIDDEN, 48, config=config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False, **own
    )
    layer.weight.main_grad = torch.ones(layer.weight.shape, dtype=main)
    layer.weight.grad_added_to_main_grad = False
    return layer


def train(layer, micro_batches=2):
    """As Megatron's gradient hook does: what the layer has not added itself is added."""
    generator = torch.Generator().manual_seed(1)
    weight = layer.weight
    for _ in range(micro_batches):
        x = torch.randn(6, 2, weight.shape[1], generator=generator).bfloat16().requires_grad_()
        out, _ = layer(x)
        out.backward(torch.randn(out.shape, generator=generator).bfloat16())
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None
    return weight.main_grad


def exactly(layer, micro_batches=2):
    """The same in float64."""
    generator = torch.Generator().manual_seed(1)
    n, k = layer.weight.shape
    main_grad = torch.ones(n, k, dtype=torch.float64)
    for _ in range(micro_batches):
        x, dy = (torch.randn(6, 2, width, generator=generator).bfloat16().double() for width in (k, n))
        main_grad += dy.flatten(0, 1).t() @ x.flatten(0, 1)
    return main_grad


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
@forked("megatron")
def test_linear_layers_add_to_the_main_gradient(kind, main):
    start()
    off = train(linear_of(kind, False, main))
    with pytest.raises((RuntimeError, NameError), match="fused_weight_gradient_mlp_cuda"):
        train(linear_of(kind, True, main))
    with mindspeed_lite.enabled(**{ON: True, "strict": True}):
        layer = linear_of(kind, True, main)
        on = train(layer)
        assert layer.weight.grad_added_to_main_grad is True
        unfused = linear_of(kind, False, main)
        assert torch.equal(train(unfused), off), "a configuration without the fusion has Megatron's own path"
        assert unfused.weight.grad_added_to_main_grad is False
    assert on.dtype == main
    exact = exactly(layer)
    assert error(on, exact) <= error(off, exact) and error(off, exact) < 0.01


@forked("megatron")
def test_an_installed_apex_is_left_alone():
    from megatron.core.tensor_parallel import layers

    apex = SimpleNamespace()
    layers.fused_weight_gradient_mlp_cuda = sys.modules[EXTENSION] = apex
    layers._grad_accum_fusion_available = True
    report = mindspeed_lite.enable(**{ON: True})
    entry = next(each for each in report.entries if each.feature == FEATURE.name)
    assert entry.status == "applied"
    assert layers.fused_weight_gradient_mlp_cuda is sys.modules[EXTENSION] is apex
    assert mindspeed_lite.disable() == []
    assert layers._grad_accum_fusion_available is True and sys.modules[EXTENSION] is apex


@forked("megatron")
def test_a_frozen_weight_gets_nothing():
    start()
    with mindspeed_lite.enabled(**{ON: True, "strict": True}):
        layer = linear_of("ColumnParallelLinear", True)
        layer.weight.requires_grad_(False)
        x = torch.randn(6, 2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        layer(x)[0].sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.ones_like(layer.weight.main_grad)) and x.grad is not None
