"""`--moe-wgrad-side-stream` in real Megatron, over a lane of the CPU's that is late: the same bits, and who waits."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import FallbackError
from mindspeed_lite.patches import moe_wgrad_side_stream as patch
from mindspeed_lite.tuning.ab_test import PAIRS, WARMUP_STEPS
from tests.harness.lanes import LateLane
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches.moe_experts import COUNTS, experts_of

NEEDED = {"moe_grouped_gemm": True, "use_gradient_accumulation_fusion": True}


@contextlib.contextmanager
def beside(when=patch.ALWAYS, delay=0.01, strict=True):
    """The feature on the CPU; gives its lane."""
    lane = LateLane(delay)
    with (
        mock.patch.object(patch, "DeviceStream", lambda device: lane),
        mock.patch.object(patch, "_why_not_here", lambda device: []),
        mindspeed_lite.enabled(**NEEDED, moe_wgrad_side_stream=when, strict=strict),
    ):
        yield lane
    assert not lane.faults


def reduced(experts, **ddp):
    """The experts behind Megatron's data parallelism, which gives them main gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(experts.config, DistributedDataParallelConfig(**ddp), experts)


def backward(model, seed=1, last=True):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sum(COUNTS), 32, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(sum(COUNTS), generator=generator).requires_grad_()
    with contextlib.nullcontext() if last else model.no_sync():
        out, _ = model(tokens, torch.tensor(COUNTS), probs)
        out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    return [tokens.grad, probs.grad]


def step(model):
    """Three microbatches; gradients of tokens and probabilities, and the main gradients that are reduced."""
    model.zero_grad_buffer()
    found = [each for seed in (1, 2, 3) for each in backward(model, seed, last=seed == 3)]
    model.finish_grad_sync()
    return [*found, *(parameter.main_grad.clone() for parameter in model.parameters())]


def experts(**fields):
    return experts_of(gradient_accumulation_fusion=True, **fields)


@pytest.mark.parametrize("overlap", [False, True], ids=["reduced at the end", "reduced in the backward pass"])
@forked("megatron")
def test_gradients_have_the_same_bits_and_are_there_when_they_are_reduced(overlap):
    start()
    with mindspeed_lite.enabled(**NEEDED, strict=True):
        off = [step(reduced(experts(), overlap_grad_reduce=overlap)) for _ in range(2)]
    with beside() as lane:
        model = reduced(experts(), overlap_grad_reduce=overlap)
        on = [step(model) for _ in range(2)]
    for ours, theirs in zip(on, off, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        assert sum(not bool(each.any()) for each in ours) == 2 * COUNTS.count(0), "nothing was added for some expert"
    assert lane.ran == 2 * 3 * 2, "steps, microbatches, layers of an expert"


@forked("megatron")
def test_nothing_waits_before_gradients_are_reduced():
    start()
    with beside() as lane:
        model = reduced(experts())
        model.zero_grad_buffer()
        lane.gate.clear()
        backward(model)
        assert not any(bool(each.main_grad.any()) for each in model.parameters()), "it was waited for"
        lane.gate.set()
        model.finish_grad_sync()
        assert any(bool(each.main_grad.any()) for each in model.parameters())


@forked("megatron")
def test_activations_that_are_released_are_there_for_as_long_as_they_are_read():
    start()
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    with mindspeed_lite.enabled(**NEEDED, strict=True):
        off = step(reduced(experts(**recompute)))
    with beside() as lane:
        on = step(reduced(experts(**recompute)))
    assert all(map(torch.equal, on, off)) and lane.ran == 6


@pytest.mark.parametrize("pays", [True, False])
@forked("megatron")
def test_auto_takes_turns_and_keeps_what_is_faster(pays):
    start()
    with beside(patch.AUTO, delay=0.0, strict=False) as lane:
        model = reduced(experts())
        ran: list[int] = []

        def clock():
            """A step takes a second, and one with it half of that more or less."""
            with_it = sum(map(bool, ran))
            return len(ran) - with_it + with_it * (0.5 if pays else 1.5)

        with mock.patch.object(patch.time, "perf_counter", clock):
            for _ in range(WARMUP_STEPS + 2 * PAIRS + 3):
                before = lane.ran
                step(model)
                ran.append(lane.ran - before)
        counted = WARMUP_STEPS + 2 * PAIRS
        assert ran[:counted] == [0, 6] * (counted // 2)
        assert ran[counted:] == [6 * pays] * 3
        said = [each for each in mindspeed_lite.report().notices if each.startswith(patch.NAME)]
        assert len(said) == 1 and ("stays on" if pays else "is off from now on") in said[0]


@forked("megatron")
def test_turned_off_with_gradients_under_way_they_still_come():
    start()
    with beside(delay=1.0):
        model = reduced(experts())
        model.zero_grad_buffer()
        backward(model)
    assert sum(not bool(each.main_grad.any()) for each in model.parameters()) == 2 * COUNTS.count(0)


@forked("megatron")
def test_turned_off_between_forward_and_backward_pass_nothing_goes_to_a_side_that_nobody_joins():
    start()
    with beside() as lane:
        model = reduced(experts())
        model.zero_grad_buffer()
        out, _ = model(torch.randn(sum(COUNTS), 32).bfloat16(), torch.tensor(COUNTS), torch.rand(sum(COUNTS)))
    lane.gate.clear()
    out.sum().backward()
    assert not lane.ran and any(bool(each.main_grad.any()) for each in model.parameters())


@forked("megatron")
def test_a_model_that_is_skipped_is_so_beside_one_that_does_not():
    start()
    with beside(strict=False) as lane:
        other = reduced(experts())
        model = reduced(experts())
        model.config.cuda_graph_impl = "local"
        off = step(model)
        assert not lane.ran
        assert all(map(torch.equal, step(other), off)) and lane.ran == 6


@forked("megatron")
def test_a_model_whose_gradients_are_not_added_in_the_product_says_so():
    start()
    with beside(), pytest.raises(FallbackError, match="gradient_accumulation_fusion"):
        reduced(experts_of(gradient_accumulation_fusion=False))
    with beside(strict=False) as lane:
        step(reduced(experts_of(gradient_accumulation_fusion=False)))
        assert not lane.ran and [each.feature for each in mindspeed_lite.report().fallbacks] == [patch.NAME]
