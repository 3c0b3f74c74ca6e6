"""`--moe-grouped-gemm` in real Megatron: Megatron's experts, one by one and together."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches import moe_grouped_gemm as patch
from mindspeed_lite.pipeline.wgrad import WgradQueue
from tests.harness.compare import error
from tests.harness.process_groups import start
from tests.harness.processes import forked
from tests.patches.moe_experts import COUNTS, experts_of

ON = {"moe_grouped_gemm": True, "strict": True}


def run(experts, counts=COUNTS, dtype=torch.bfloat16):
    """Output, and the gradients of tokens, probabilities and parameters."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(sum(counts), 32, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    out, bias = experts(tokens, torch.tensor(counts), probs)
    assert bias is None
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [out.detach(), tokens.grad, probs.grad, *(parameter.grad for parameter in experts.parameters())]


def close(on, off):
    assert len(on) == len(off)
    for got, want in zip(on, off, strict=True):
        # An expert without a token has no gradient in the loop's graph.
        want = torch.zeros_like(got) if want is None else want
        # Two eps of bf16, and two more: Megatron rounds once before it adds a bias, and once after.
        assert got.dtype == want.dtype and error(got, want.double()) <= 2**-6


@forked("megatron")
def test_experts_together_are_the_loop():
    start()
    experts = experts_of()
    off = run(experts)
    names = list(experts.state_dict())
    with mindspeed_lite.enabled(**ON):
        calls = []
        inner = patch.grouped_matmul
        patch.grouped_matmul = lambda *args, **how: calls.append(1) or inner(*args, **how)
        try:
            close(run(experts), off)
        finally:
            patch.grouped_matmul = inner
        assert len(calls) == 2, "one product for each of the two layers, not one for each expert"
        close(run(experts, [0, 16, 0, 0]), run(experts, [0, 16, 0, 0]))
    assert list(experts.state_dict()) == names
    again = run(experts)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(off, again, strict=True))


@forked("megatron")
def test_no_tokens_at_all():
    start()
    with mindspeed_lite.enabled(**ON):
        out, *gradients = run(experts_of(), [0, 0, 0, 0])
    assert out.shape == (0, 32) and all(bool((each == 0).all()) for each in gradients)


@forked("megatron")
def test_the_activation_is_recomputed_with_the_same_bits():
    start()
    plain = experts_of()
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    recomputed = experts_of(**recompute)
    with mindspeed_lite.enabled(**ON):
        kept = [run(plain), run(recomputed)]
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
        tokens = torch.randn(sum(COUNTS), 32).bfloat16().requires_grad_()
        alive = []
        inner = patch.grouped_matmul

        def watched(x, *rest, **how):
            alive.append(x)
            return inner(x, *rest, **how)

        patch.grouped_matmul = watched
        try:
            out, _ = recomputed(tokens, torch.tensor(COUNTS), torch.rand(sum(COUNTS)))
        finally:
            patch.grouped_matmul = inner
        assert alive[1].untyped_storage().size() == 0, "the second layer's input is not kept"
        out.sum().backward()


@pytest.mark.parametrize("zero_out", [False, True])
@forked("megatron")
def test_weight_gradients_go_to_the_main_gradient(zero_out):
    start()
    flags = {**ON, "use_gradient_accumulation_fusion": True}
    with mindspeed_lite.enabled(**flags):
        unfused = run(experts_of())
        experts = experts_of(gradient_accumulation_fusion=True)
        for weight in experts.parameters():
            weight.main_grad = torch.ones(weight.shape)
            weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = zero_out
        run(experts)
        for weight, gradient in zip(experts.parameters(), unfused[3:], strict=True):
            assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape
            assert not zero_out or not weight.grad.any()
            assert error(weight.main_grad - 1, gradient.double()) <= 2**-7


@forked("megatron")
def test_what_it_cannot_do_is_left_to_the_loop():
    start()
    frozen = experts_of()
    next(frozen.parameters()).requires_grad_(False)
    off = run(frozen)
    with mindspeed_lite.enabled(moe_grouped_gemm=True):
        on = run(frozen)
        run(frozen)
        (said,) = mindspeed_lite.report().fallbacks
    assert "frozen" in str(said) and "moe_grouped_gemm" in str(said)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(on, off, strict=True))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@forked("megatron")
def test_hooks_that_come_and_go_are_called(kind):
    start()
    experts, seen = experts_of(), []
    expert = experts.local_experts[1]
    with mindspeed_lite.enabled(moe_grouped_gemm=True):
        run(experts)
        for module in (expert, expert.linear_fc1, expert.linear_fc2):
            handle = getattr(module, f"register_{kind}_hook")(lambda module, *_: seen.append(module))
            run(experts)
            assert seen == [module]
            handle.remove()
            seen.clear()
        (said,) = mindspeed_lite.report().fallbacks
        expert.linear_fc1.weight.requires_grad_(False)
        run(experts)
    assert "hook" in str(said) and expert.linear_fc1.weight.grad is None


@forked("megatron")
def test_gradients_of_which_only_some_layers_are_delayed_are_added_once():
    start()
    found = []
    with mindspeed_lite.enabled(**ON, use_gradient_accumulation_fusion=True):
        for delayed in (False, True):
            experts = experts_of(gradient_accumulation_fusion=True)
            for parameter in experts.parameters():
                parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
            queue = WgradQueue()
            if delayed:
                experts.local_experts[0].linear_fc1.wgrad_queue = queue
            run(experts)
            assert queue.drain() == delayed
            found.append([parameter.main_grad for parameter in experts.parameters()])
            assert sum(bool(each.any()) for each in found[-1]) == 2 * (len(COUNTS) - COUNTS.count(0))
    assert all(map(torch.equal, *found))
