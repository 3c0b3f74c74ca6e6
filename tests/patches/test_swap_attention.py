"""`--swap-attention` in real Megatron, over a link of the CPU's: the same bits, and what moves is what was chosen."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import OptionError
from mindspeed_lite.patches import swap_attention
from tests.harness.gpt_block import BATCH, HIDDEN, LAYERS, SEQUENCE, model_of, same, step
from tests.harness.lanes import Lanes
from tests.harness.processes import forked

ONE = 2 * SEQUENCE * BATCH * HIDDEN


@contextlib.contextmanager
def swapping(smallest=1, bandwidth=1e7, **flags):
    """The feature on the CPU; gives its lanes."""
    lanes = Lanes(bandwidth)
    with (
        mock.patch.object(swap_attention, "CopyEngine", lambda device: lanes),
        mock.patch.object(swap_attention, "_why_not_here", lambda device: []),
        mock.patch("mindspeed_lite.memory.offload.SMALLEST", smallest),
        mindspeed_lite.enabled(swap_attention=True, strict=True, **flags),
    ):
        yield lanes
    assert not lanes.faults


@pytest.mark.parametrize(
    ("features", "modules"),
    [
        ({}, swap_attention._DEFAULT),
        ({}, "self_attention.core_attention"),
        ({"use_flash_attn": True, "use_fused_rmsnorm": True, "use_fused_rotary_pos_emb": True}, "self_attention,mlp"),
        (
            {"recompute_norm": True, "recompute_activation_function": True, "use_fused_swiglu": True},
            swap_attention._DEFAULT,
        ),
    ],
    ids=["torch", "core", "fused", "recompute"],
)
@forked("megatron")
def test_bits_are_the_same_and_chosen_modules_move(features, modules):
    platform.activate()
    with mindspeed_lite.enabled(**features):
        off = step(model_of())
    with swapping(**features, swap_modules=modules) as lanes:
        model = model_of()
        on, once = step(model), dict(lanes.moved)
        again = step(model)
    assert same(on, off) and same(again, off)
    # Queries, keys and values, of all layers but the last, twice.
    assert lanes.moved["back"] >= 2 * (LAYERS - 1) * 3 * ONE
    # What others hold on to is known after the first step.
    assert lanes.moved["out"] - once["out"] == once["back"] == lanes.moved["back"] - once["back"]


@forked("megatron")
def test_what_is_kept_beside_is_what_was_not_chosen():
    """With fused operators a layer's attention and norms keep their inputs, its projections theirs: all move."""
    flags = {"use_flash_attn": True, "use_fused_rmsnorm": True}
    with swapping(bandwidth=float("inf"), **flags) as lanes:
        step(model_of())
    layer = {
        "inputs of two norms": 2 * ONE,
        "normed, for the query, key and value": ONE,
        "query, key and value": 3 * ONE,
        "attention's output": ONE,
        "normed, for the MLP": 0,  # saved by the MLP, which was not chosen
    }
    # The first layer's input is the caller's.
    assert abs(lanes.moved["back"] - (LAYERS - 1) * sum(layer.values())) <= 2 * ONE, lanes.moved


@forked("megatron")
def test_evaluation_and_the_end_of_the_feature_move_nothing():
    platform.activate()
    with swapping() as lanes:
        model = model_of()
        with torch.no_grad():
            model(torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16(), attention_mask=None)
        assert lanes.moved == {"out": 0, "back": 0}
        step(model)
        moved = dict(lanes.moved)
        assert moved["out"]
    off = step(model)
    assert lanes.moved == moved and off[0] > 0
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@forked("megatron")
def test_a_module_that_is_not_there_is_named():
    with swapping(swap_modules="self_attention,attention"), pytest.raises(OptionError) as error:
        model_of()
    assert "--swap-modules attention: `swap_attention` finds no such module in a TransformerLayer" in str(error.value)
    assert "self_attention" in str(error.value).partition("there are")[2]


@forked("megatron")
def test_too_little_room_is_a_fallback_that_names_the_budget():
    platform.activate()
    platform.activate()
    off = step(model_of())
    lanes = Lanes()
    with (
        mock.patch.object(swap_attention, "CopyEngine", lambda device: lanes),
        mock.patch.object(swap_attention, "_why_not_here", lambda device: []),
        mock.patch("mindspeed_lite.memory.offload.SMALLEST", 1),
        mindspeed_lite.enabled(swap_attention=True, swap_attention_budget=ONE * 2.5 / 2**30),
    ):
        on = step(model_of())
        (fallback,) = mindspeed_lite.report().fallbacks
    assert same(on, off) and 0 < sum(lanes.allocated) <= 2.5 * ONE
    assert fallback.feature == "swap_attention" and "budget of" in fallback.reason


def test_names_of_mindspeed_are_those_of_megatron():
    assert ",".join(swap_attention._names("input_norm, self_attention,post_attention_norm")) == swap_attention._DEFAULT
