"""`--delay-wgrad-compute` in real Megatron: when a weight's gradient is computed, by whom, and what is told."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import FallbackError
from mindspeed_lite.patches import delay_wgrad_compute as patch
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches.linear_layers import HIDDEN, config_of

FEATURE = patch.FEATURE
FLAGS = {"use_gradient_accumulation_fusion": True, "delay_wgrad_compute": True}


def delayed(config):
    """Past Megatron's check that the combined schedule is on, which needs several processes."""
    config.delay_wgrad_compute = True
    return config


def mlp_of(config):
    """Megatron's MLP, whose `backward_dw` asks both of its layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    mlp = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    generator = torch.Generator().manual_seed(5)
    for weight in mlp.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 8)
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
    return mlp


def step(mlp, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, HIDDEN, generator=generator).bfloat16().requires_grad_()
    out, _ = mlp(x)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    return x.grad


def gradients(mlp):
    return [weight.main_grad.clone() for weight in mlp.parameters()]


@forked("megatron")
def test_the_gradient_comes_when_it_is_asked_for_with_the_same_bits():
    start()
    with mindspeed_lite.enabled(**FLAGS, strict=True):
        now, late = mlp_of(config_of(True)), mlp_of(delayed(config_of(True)))
        assert torch.equal(step(now), step(late))
        assert all(not bool(each.any()) for each in gradients(late)), "computed before it was asked for"
        assert all(bool(each.any()) for each in gradients(now))
        late.backward_dw()
        now.backward_dw()
        assert all(map(torch.equal, gradients(now), gradients(late)))
        for seed in (2, 3):  # two backward passes before it is asked for
            step(now, seed)
            step(late, seed)
        late.backward_dw()
        assert all(map(torch.equal, gradients(now), gradients(late)))


@forked("megatron")
def test_what_reduces_gradients_is_told_after_each():
    start()
    with mindspeed_lite.enabled(**FLAGS, strict=True):
        mlp = mlp_of(delayed(config_of(True)))
        said = []
        for layer in (mlp.linear_fc1, mlp.linear_fc2):
            assert layer.weight.skip_backward_post_hook is True
            layer.register_wgrad_accumulation_and_reduce_hooks(
                lambda weight=layer.weight: said.append(bool(weight.main_grad.any()))
            )
        step(mlp)
        assert said == []
        mlp.backward_dw()
        assert said == [True, True]


@forked("megatron")
def test_only_layers_that_a_schedule_asks_are_delayed():
    from megatron.core.tensor_parallel import ColumnParallelLinear

    start()
    with mindspeed_lite.enabled(**FLAGS, strict=True):
        plain = mlp_of(config_of(True))
        assert not any(hasattr(layer, "wgrad_queue") for layer in (plain.linear_fc1, plain.linear_fc2))
        output_layer = ColumnParallelLinear(
            HIDDEN, 64, config=delayed(config_of(True)), init_method=torch.nn.init.normal_, bias=False,
            gather_output=False, skip_bias_add=False,
        )  # fmt: skip
        assert not hasattr(output_layer, "wgrad_queue")
        mlp = mlp_of(delayed(config_of(True)))
        mlp.linear_fc1.weight.requires_grad_(False)
        with torch.no_grad():
            mlp(torch.randn(6, 2, HIDDEN, dtype=torch.bfloat16))
        step(mlp)
        assert len(mlp.linear_fc1.wgrad_queue) == 0 and len(mlp.linear_fc2.wgrad_queue) == 1


@forked("megatron")
def test_a_model_without_the_fusion_is_not_delayed_and_says_so():
    start()
    with mindspeed_lite.enabled(**FLAGS, strict=True), pytest.raises(FallbackError, match="fusion"):
        mlp_of(delayed(config_of(False)))
    mindspeed_lite.enable(**FLAGS)
    mlp = mlp_of(delayed(config_of(False)))
    step(mlp)
    assert mlp.linear_fc1.weight.grad is not None
    assert [each.feature for each in mindspeed_lite.report().fallbacks] == [FEATURE.name]


def reduced(mlp, config, **ddp):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp), mlp)


class Wrapped(torch.nn.Module):
    """A linear layer in a wrapper that knows nothing of delayed gradients, as adapters are."""

    def __init__(self, linear):
        super().__init__()
        self.to_wrap = linear

    def forward(self, *args):
        return self.to_wrap(*args)


@forked("megatron")
def test_a_wrapped_linear_layer_computes_its_gradient_when_its_owner_is_asked():
    start()
    config = delayed(config_of(True))
    mindspeed_lite.enable(**FLAGS, strict=True)
    late, now = mlp_of(config), mlp_of(config_of(True))
    late.linear_fc1, late.linear_fc2 = Wrapped(late.linear_fc1), Wrapped(late.linear_fc2)
    reduced(late, config)
    weights = late.linear_fc1.to_wrap.weight, late.linear_fc2.to_wrap.weight
    for each in (late, now):
        step(each)
    assert not any(bool(weight.main_grad.any()) for weight in weights)
    late.backward_dw()
    assert all(torch.equal(weight.main_grad, each) for weight, each in zip(weights, gradients(now), strict=True))
    mindspeed_lite.disable()
    assert not hasattr(late.linear_fc1, "backward_dw")


@forked("megatron")
def test_what_nobody_asked_for_is_computed_before_gradients_are_reduced():
    start()
    config = delayed(config_of(True))
    mindspeed_lite.enable(**FLAGS)
    late, now = mlp_of(config), mlp_of(config_of(True))
    model = reduced(late, config)
    for each in (late, now):
        step(each)
    assert not bool(late.linear_fc1.weight.main_grad.any())
    model.finish_grad_sync()
    assert all(map(torch.equal, gradients(now), gradients(late)))
    assert ["no schedule" in each.reason for each in mindspeed_lite.report().fallbacks] == [True]


@forked("megatron")
def test_a_reduction_that_does_not_know_of_the_delay_turns_it_off():
    start()
    config = delayed(config_of(True))
    mindspeed_lite.enable(**FLAGS)
    mlp = mlp_of(config)
    reduced(mlp, config, overlap_grad_reduce=True)
    step(mlp)
    assert bool(mlp.linear_fc1.weight.main_grad.any())
    assert ["overlap_grad_reduce" in each.reason for each in mindspeed_lite.report().fallbacks] == [True]


@forked("megatron")
def test_hooks_are_those_of_before_when_the_feature_is_on_again():
    start()
    config = delayed(config_of(True))
    mindspeed_lite.enable(**FLAGS)
    late, now = mlp_of(config), mlp_of(config_of(True))
    model = reduced(late, config, delay_wgrad_compute=True)
    layers = (late.linear_fc1, late.linear_fc2)
    hooks, nodes = [[*getattr(each, patch._QUEUE).hooks] for each in layers], [*model.grad_accs]
    assert all(hooks)
    for _ in range(2):
        mindspeed_lite.disable()
        assert model.grad_accs[:-2] == nodes
        model.grad_accs.append(other := object())
        mindspeed_lite.enable(**FLAGS)
        assert [[*getattr(each, patch._QUEUE).hooks] for each in layers] == hooks and model.grad_accs.pop() is other
        assert model.grad_accs == nodes
    for each in (late, now):
        step(each)
    assert not bool(late.linear_fc1.weight.main_grad.any())
    late.backward_dw()
    assert all(map(torch.equal, gradients(now), gradients(late)))
