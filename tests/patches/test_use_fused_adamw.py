"""`--use-fused-adamw` in real Megatron: the same training as off, in fewer passes, whatever optimizer stands around."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import EngineError
from mindspeed_lite.optim.fused_adam import FusedAdamW
from tests.harness.optimizers import KINDS, assert_equal, gradients, inner, optimizer_of, start, train
from tests.harness.processes import forked
from tests.harness.swapped import is_swapped


class Passes(TorchDispatchMode):
    """Names of the operators that go over more than a number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(args)):
            self.seen.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed"])
@forked("megatron")
def test_clipping_and_copying_are_part_of_the_step(kind: str, groups: Path) -> None:
    """Gradients stay as they were, nothing is copied apart, and 16-bit weights are the rounded main ones."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    start(groups)
    with mindspeed_lite.enabled(use_fused_adamw=True):
        model, optimizer = optimizer_of(**KINDS[kind])
        gradients(model, 1)
        before = [parameter.main_grad.clone() for parameter in model.parameters()]
        passes = Passes()
        with passes:
            _, norm, _ = optimizer.step()
        assert norm > 0.5, "there is nothing to clip"
        assert passes.seen.isdisjoint({"copy_", "mul", "mul_", "_foreach_mul_", "_foreach_copy_", "sqrt"})
        for parameter, kept in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.main_grad, kept)
            if parameter.dtype == torch.bfloat16:
                assert torch.equal(parameter, parameter.main_param.view_as(parameter).bfloat16())
        # A step that is torch's own leaves the copy to Megatron and gets gradients that are clipped.
        for group in inner(optimizer).param_groups:
            group["amsgrad"] = True
        inner(optimizer).state.clear()
        gradients(model, 1)
        with passes:
            optimizer.step()
        assert passes.seen >= {"copy_", "_foreach_mul_", "sqrt"}
        (fallback,) = mindspeed_lite.report().fallbacks
        assert fallback.reason == "amsgrad is set"
        for parameter, kept in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.main_grad, kept * (0.5 / (norm + 1e-6)))
            if parameter.dtype == torch.bfloat16:
                assert torch.equal(parameter, parameter.main_param.view_as(parameter).bfloat16())
    assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm


@forked("megatron")
def test_what_was_deferred_for_a_step_that_never_came_is_dropped(groups: Path) -> None:
    from megatron.core.optimizer import clip_grads

    start(groups)
    with mindspeed_lite.enabled(use_fused_adamw=True, strict=True):
        for options in ({"bf16": True}, {}):
            model, optimizer = optimizer_of(**options)
            gradients(model, 0)
            optimizer.prepare_grads()
            clip_grads.clip_grad_by_total_norm_fp32(optimizer.get_parameters(), 1.0, 8.0)
            assert set(inner(optimizer).step_data.grad_scales.values()) == {1 / (8.0 + 1e-6)}
            optimizer.prepare_grads()
            assert not inner(optimizer).step_data.grad_scales
            # Parameters that nobody of ours updates are clipped where they are.
            stranger = torch.nn.Parameter(torch.ones(3))
            stranger.grad = torch.ones(3)
            clip_grads.clip_grad_by_total_norm_fp32([*optimizer.get_parameters(), stranger], 1.0, 2.0)
            assert not inner(optimizer).step_data.grad_scales
            torch.testing.assert_close(stranger.grad, torch.full((3,), 0.5))


@forked("megatron")
def test_where_clipped_gradients_are_read_clipping_is_a_pass(groups: Path) -> None:
    start(groups)
    options = {"bf16": True, "log_num_zeros_in_grad": True}
    off = train(options)
    mindspeed_lite.enable(use_fused_adamw=True)
    on = train(options)
    assert_equal(*({**each, "kind": None} for each in (on, off)))
    assert on["kind"] is FusedAdamW
    (fallback,) = mindspeed_lite.report().fallbacks
    assert "--log-num-zeros-in-grad" in fallback.reason


@forked("megatron")
def test_other_optimizers_are_left_alone_and_that_is_said(groups: Path) -> None:
    start(groups)
    mindspeed_lite.enable(use_fused_adamw=True)
    _, optimizer = optimizer_of(bf16=True, optimizer="sgd")
    assert type(inner(optimizer)) is torch.optim.SGD
    (fallback,) = mindspeed_lite.report().fallbacks
    assert fallback.reason == "the optimizer is torch.optim.sgd.SGD, not Adam or AdamW"
    mindspeed_lite.disable()
    mindspeed_lite.enable(use_fused_adamw=True, strict=True)
    with pytest.raises(EngineError, match=r"torch\.optim\.sgd\.SGD"):
        optimizer_of(bf16=True, optimizer="sgd")


@forked("megatron")
def test_multi_tensor_functions_are_fast_ones_and_come_back() -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    platform.activate()
    originals = (utils.local_multi_tensor_l2_norm, utils.local_multi_tensor_scale)
    held = (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl)
    assert held == originals
    tensors = [torch.randn(7, 3), torch.randn(0), torch.randn(11)]
    expected, _ = utils.local_multi_tensor_applier(clip_grads.l2_norm_impl, None, [tensors], False)
    with mindspeed_lite.enabled(use_fused_adamw=True):
        assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm is originals[0]
        assert all(map(is_swapped, originals))
        norm, each = utils.local_multi_tensor_applier(clip_grads.l2_norm_impl, None, [tensors], False)
        assert each is None and norm.shape == expected.shape and norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected)
        assert utils.local_multi_tensor_l2_norm(0, None, [[]], False)[0] == 0.0
        scaled = [tensor.clone() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in scaled]
        utils.local_multi_tensor_scale(0, None, [scaled, scaled], 0.3)
        narrow = [torch.zeros_like(tensor, dtype=torch.float16) for tensor in tensors]
        utils.local_multi_tensor_scale(0, None, [tensors, narrow], 1.0)
        other = [torch.zeros_like(tensor) for tensor in tensors]
        utils.local_multi_tensor_scale(0, None, [tensors, other], 0.3)
        assert [tensor.data_ptr() for tensor in scaled] == addresses
        for tensor, a, b, c in zip(tensors, scaled, narrow, other, strict=True):
            assert torch.equal(a, tensor * 0.3) and torch.equal(c, tensor * 0.3) and torch.equal(b, tensor.half())
        utils.local_multi_tensor_scale(0, None, [[], []], 0.3)
    assert (utils.local_multi_tensor_l2_norm, utils.local_multi_tensor_scale) == originals
    assert (clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl) == held and not any(map(is_swapped, held))
