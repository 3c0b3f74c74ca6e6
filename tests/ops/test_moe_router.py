"""moe_router: its reference against the formulas, and every other path against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.ops.dispatch import REFERENCE, force
from mindspeed_lite.ops.moe_router import (
    OPERATOR,
    SCORE_FUNCTIONS,
    aux_loss_scores,
    cpu,
    load_balancing_loss,
    topk_routing,
)
from mindspeed_lite.ops.moe_router.reference import routing_map

cuda = pytest.importorskip("mindspeed_lite.ops.moe_router.cuda", reason="Triton is not installed")
compiled = pytest.mark.skipif(cpu.LIBRARY.unusable() is not None, reason=str(cpu.LIBRARY.unusable()))
Tensors = tuple[torch.Tensor, torch.Tensor]


def on(backend: str, function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The public function on a backend; "triton" is the CUDA backend's on CPU tensors."""

    def run(*arguments: Any, **options: Any) -> Tensors:
        if backend == "triton":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OPERATOR, "_backend", lambda case, tensors: cuda)
                return function(*arguments, **options)
        with force("moe_router", backend):
            return function(*arguments, **options)

    return run


def make(tokens: int, experts: int, dtype: torch.dtype, seed: int = 0, size: float = 2.0) -> torch.Tensor:
    return (size * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))).to(dtype)


# ---- what it is ----


def test_the_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    s = [1 / (1 + math.exp(-t)) for t in (1.0, 3.0, 2.0, -1.0)]
    e = [math.exp(t) for t in (1.0, 3.0, 2.0, -1.0)]
    r = [math.sqrt(math.log1p(math.exp(t))) for t in (1.0, 3.0, 2.0, -1.0)]

    def routed(*expected: float, **options: Any) -> None:
        probs, chosen = on(REFERENCE, topk_routing)(x, 2, **options)
        torch.testing.assert_close(probs, torch.tensor([expected], dtype=torch.float64))
        assert chosen.dtype == torch.bool and torch.equal(chosen, probs > 0)

    routed(0, e[1] / (e[1] + e[2]), e[2] / (e[1] + e[2]), 0)
    routed(0, 3 * e[1] / sum(e), 3 * e[2] / sum(e), 0, use_pre_softmax=True, scaling_factor=3.0)
    routed(0, s[1] / (s[1] + s[2]), s[2] / (s[1] + s[2]), 0, score_function="sigmoid")
    routed(0, r[1] / (r[1] + r[2]), r[2] / (r[1] + r[2]), 0, score_function="sqrtsoftplus")
    # The bias takes the first in place of the third, and is in no probability.
    bias = torch.tensor([0.5, 0.0, 0.0, 0.0])
    routed(s[0] / (s[0] + s[1]), s[1] / (s[0] + s[1]), 0, 0, score_function="sigmoid", expert_bias=bias)
    routed(0, e[1] / (e[1] + e[2]), e[2] / (e[1] + e[2]), 0, expert_bias=100 * bias)
    # Of the two groups the first has the higher sum.
    groups = {"num_groups": 2, "group_topk": 1}
    routed(s[0] / (s[0] + s[1]), s[1] / (s[0] + s[1]), 0, 0, score_function="sigmoid", **groups)
    # A single expert's score is not divided by itself.
    probs, chosen = on(REFERENCE, topk_routing)(x, 1, score_function="sigmoid")
    torch.testing.assert_close(probs, torch.tensor([[0, s[1], 0, 0]], dtype=torch.float64))
    assert chosen.tolist() == [[False, True, False, False]]

    for function, scores in (("softmax", e), ("sigmoid", s), ("sqrtsoftplus", r)):
        chosen, found = aux_loss_scores(x, 2, function)
        assert gradcheck(lambda x, by=function: aux_loss_scores(x, 2, by)[1], x.clone().requires_grad_())
        torch.testing.assert_close(found, torch.tensor([scores], dtype=torch.float64) / sum(scores))
        assert chosen.tolist() == [[False, True, True, False]]


def test_the_loss_is_the_formula() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.25, 0.75]], requires_grad=True)
    loss = load_balancing_loss(probs, torch.tensor([1, 3]), 4, 1, 2, 0.1)
    factor = 0.1 * 2 / 16
    torch.testing.assert_close(loss, torch.tensor(factor * (0.75 + 3 * 1.25)))
    loss.backward()
    torch.testing.assert_close(probs.grad, factor * torch.tensor([[1.0, 3.0], [1.0, 3.0]]))
    for total in (torch.tensor(4), torch.tensor(4.0), torch.tensor(4, dtype=torch.int32)):
        torch.testing.assert_close(load_balancing_loss(probs, torch.tensor([1.0, 3.0]), total, 1, 2, 0.1), loss)
    rounded = load_balancing_loss(probs.detach().bfloat16(), torch.tensor([1, 3]), 4, 1, 2, 0.1)
    assert rounded.dtype == torch.float32 and rounded.shape == () and torch.equal(rounded, loss)
    wide = probs.detach().double().requires_grad_()
    assert load_balancing_loss(wide, torch.tensor([1, 3]), torch.tensor(4), 1, 2, 0.1).dtype == torch.float64
    assert gradcheck(lambda p: load_balancing_loss(p, torch.tensor([1, 3]), 4, 1, 2, 0.1), [wide])


# ---- kernels and torch_npu's operators against the reference ----


def megatron_choice(
    scores: torch.Tensor, topk: int, groups: tuple[int, int] | None, top: Any = torch.topk
) -> torch.Tensor:
    """The experts, by the operators that Megatron's group_limited_topk and topk_routing call."""
    if groups is None:
        return top(scores, topk)[1]
    number, chosen = groups
    tokens, experts = scores.shape
    worth = top(scores.view(tokens, number, -1), topk // chosen)[0].sum(dim=-1)
    mask = torch.zeros_like(worth).scatter_(1, top(worth, chosen)[1], 1)
    wide = mask.unsqueeze(-1).expand(tokens, number, experts // number).reshape(tokens, -1)
    return top(scores.masked_fill(~wide.bool(), float("-inf")), topk)[1]


def lowest_first(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk as on CUDA: of equal scores the first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :topk], places[..., :topk]


@st.composite
def choices(draw: Any) -> tuple[torch.Tensor, int, tuple[int, int] | None]:
    """Logits of which many are equal, how many to take, and groups."""
    groups = None
    if draw(st.booleans()):
        number, size = draw(st.integers(1, 12)), draw(st.integers(2, 40))
        experts, taken, best = number * size, draw(st.integers(1, number)), draw(st.integers(1, 2))
        topk = min(taken * best + draw(st.integers(0, taken - 1)), taken * size)
        groups = (number, taken)
    else:
        experts = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 256, 300, 512, 1024, 2048])))
        topk = draw(st.integers(1, min(experts, draw(st.sampled_from([1, 4, 8, 16, 40, 200])))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tokens = draw(st.integers(1, 20))
    kind = draw(st.sampled_from(["few", "one", "many", "continuous", "saturated", "infinite", "nan"]))
    if kind in ("few", "one", "many"):
        highest = {"few": 3, "one": 1, "many": 60}[kind]
        x = torch.randint(0, highest, (tokens, experts), generator=generator).float() / 7 - 2
    else:
        x = torch.randn(tokens, experts, generator=generator) * (40 if kind == "saturated" else 1)
        hit = torch.rand(tokens, experts, generator=generator)
        if kind == "infinite":
            x = x.masked_fill(hit < 0.1, -torch.inf).masked_fill(hit > 0.95, torch.inf)
        if kind == "nan":
            x = x.masked_fill(hit < 0.05, torch.nan)
    return x, topk, groups


@compiled
@settings(max_examples=400)
@given(
    choice=choices(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scores=st.sampled_from([*SCORE_FUNCTIONS, "pre_softmax"]),
    bias=st.sampled_from([None, "zero", "few", "continuous"]),
)
def test_the_cpu_kernel_chooses_as_torch_does(
    choice: tuple[torch.Tensor, int, tuple[int, int] | None], dtype: torch.dtype, scores: str, bias: str | None
) -> None:
    x, topk, groups = choice
    x = x.to(dtype)
    experts = x.shape[1]
    options: dict[str, Any] = {"score_function": "softmax" if scores == "pre_softmax" else scores}
    options["use_pre_softmax"] = scores == "pre_softmax"
    if groups is not None:
        options["num_groups"], options["group_topk"] = groups
    by = {
        "softmax": lambda: x,
        "pre_softmax": lambda: torch.softmax(x, dim=-1, dtype=torch.float32),
        "sigmoid": lambda: torch.sigmoid(x.float()),
        "sqrtsoftplus": lambda: torch.nn.functional.softplus(x.float()).sqrt(),
    }[scores]()
    if bias is not None:
        generator = torch.Generator().manual_seed(topk)
        options["expert_bias"] = {
            "zero": torch.zeros(experts),
            "few": torch.randint(0, 3, (experts,), generator=generator) / 4,
            "continuous": torch.randn(experts, generator=generator),
        }[bias]
        if scores in ("sigmoid", "sqrtsoftplus"):
            by = by + options["expert_bias"].float()
    expected = megatron_choice(by, topk, groups)
    run = on("cpu", topk_routing)
    _, chosen = run(x, topk, **options)
    assert torch.equal(chosen, routing_map(x, expected))
    assert torch.equal(chosen, on(REFERENCE, topk_routing)(x, topk, **options)[1])


@compiled
def test_groups_of_16_bit_logits_are_judged_by_rounded_sums() -> None:
    """As torch.sum rounds: sums that differ in fp32 are equal then, and another group may be taken."""
    x = make(4096, 64, torch.bfloat16)
    options = {"num_groups": 8, "group_topk": 2}
    ours = on("cpu", topk_routing)(x, 4, **options)[1]
    assert torch.equal(ours, routing_map(x, megatron_choice(x, 4, (8, 2))))
    assert not torch.equal(ours, routing_map(x, megatron_choice(x.float(), 4, (8, 2))))


@pytest.mark.parametrize(
    ("experts", "topk", "groups"), [(64, 4, None), (33, 33, None), (60, 4, (12, 4)), (60, 10, (5, 2))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("triton_runs")
def test_triton_chooses_the_first_of_equal_experts(
    experts: int, topk: int, groups: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    x = torch.randint(0, 9, (5, experts), generator=torch.Generator().manual_seed(0)).to(dtype) / 7 - 1
    x[0, 3], x[1, ::2], x[2, 5] = torch.nan, -torch.inf, torch.inf
    options = {} if groups is None else {"num_groups": groups[0], "group_topk": groups[1]}
    bias = torch.arange(experts) % 3 / 4
    for how, by in (
        ({}, x),
        ({"score_function": "sigmoid", "expert_bias": bias}, x.float().sigmoid() + bias),
    ):
        chosen = on("triton", topk_routing)(x, topk, **options, **how)[1]
        assert torch.equal(chosen, routing_map(x, megatron_choice(by, topk, groups, lowest_first)))


@pytest.mark.parametrize("groups", [{}, {"num_groups": 8, "group_topk": 2}])
@pytest.mark.parametrize("scores", [*SCORE_FUNCTIONS, "pre_softmax"])
@pytest.mark.usefixtures("triton_runs")
def test_triton_chooses_and_differentiates_as_the_reference(scores: str, groups: dict[str, int]) -> None:
    pre = scores == "pre_softmax"
    options: dict[str, Any] = {"score_function": "softmax" if pre else scores, "use_pre_softmax": pre, **groups}
    bias = torch.linspace(-1, 1, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    results = []
    for backend in ("triton", REFERENCE):
        x = make(20, 64, torch.float32).requires_grad_()
        given = {"expert_bias": bias, "scaling_factor": 2.5}
        probs, chosen = on(backend, topk_routing)(x, 4, **options, **given)
        results.append((chosen, probs, *torch.autograd.grad(probs.cos().sum(), x)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1:], results[1][1:])


# ---- how exact it is ----


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.usefixtures("triton_runs")
def test_scores_far_from_zero_have_the_gradient_of_their_limit(function: str) -> None:
    x = torch.tensor([[-200.0, -60.0, -12.0, -3.0, 0.0, 4.0, 19.9, 20.1]])
    x = torch.cat([x, x.flip(1)]).requires_grad_()
    probs, _ = on("triton", topk_routing)(x, 8, score_function=function)
    (found,) = torch.autograd.grad(probs, x, torch.arange(16.0).view(2, 8))
    wide = x.detach().double().requires_grad_()
    probs, _ = on(REFERENCE, topk_routing)(wide, 8, score_function=function)
    (exact,) = torch.autograd.grad(probs, wide, torch.arange(16.0).view(2, 8))
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-7)


def test_the_gradient_of_the_loss_is_one_row() -> None:
    scores = make(40, 16, torch.float32).softmax(-1).requires_grad_()
    loss = load_balancing_loss(scores, torch.arange(16), 40, 2, 16, 0.1)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.shape == (40, 16) and gradient.stride() == (0, 1)


# ---- the NPU path on an emulation of torch_npu ----


# ---- which backend, and what is refused ----


@pytest.mark.parametrize(
    ("shape", "topk", "options", "words"),
    [
        ((4, 8), 2, {"score_function": "relu"}, "score_function is one of softmax, sigmoid, sqrtsoftplus, not 'relu'"),
        ((2, 4, 8), 2, {}, r"want logits \[T, E\]"),
        ((4, 8), 9, {}, "topk 9 of 8 experts"),
        ((4, 8), 0, {}, "topk 0 of 8 experts"),
        ((4, 8), 2, {"group_topk": 2}, "2 of None groups of 8 experts"),
        ((4, 8), 2, {"group_topk": 2, "num_groups": 3}, "2 of 3 groups"),
        ((4, 8), 6, {"group_topk": 6, "num_groups": 4}, "6 of 4 groups"),
        ((4, 8), 2, {"group_topk": 4, "num_groups": 4}, "at least one of each group"),
        ((4, 8), 5, {"group_topk": 2, "num_groups": 4}, "no more than there are"),
        ((4, 8), 2, {"score_function": "sigmoid", "expert_bias": torch.zeros(4)}, r"want expert_bias \[8\]"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(
    shape: tuple[int, ...], topk: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        topk_routing(torch.zeros(shape), topk, **options)


def test_integers_are_no_logits_and_counts_are_for_experts() -> None:
    with pytest.raises(ValueError, match="in floating point"):
        topk_routing(torch.zeros(4, 8, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="topk 9"):
        aux_loss_scores(torch.zeros(4, 8), 9, "softmax")
    with pytest.raises(ValueError, match=r"tokens_per_expert \[E\]"):
        load_balancing_loss(torch.zeros(4, 8), torch.zeros(4), 4, 2, 8, 0.1)
