"""moe_router: its reference against the formulas, and every other path against the reference, choice by choice."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.ops import native
from mindspeed_lite.ops.dispatch import REFERENCE, force
from mindspeed_lite.ops.moe_router import (
    OPERATOR,
    SCORE_FUNCTIONS,
    Case,
    aux_loss_scores,
    cpu,
    load_balancing_loss,
    topk_routing,
)
from mindspeed_lite.ops.row_kernels import launch
from tests.harness.compare import assert_not_worse, error, forward_backward, one_thread
from tests.harness.errors import assert_within, bound
from tests.harness.processes import clean_environment
from tests.harness.reasons import why_not_of
from tests.harness.triton_compile import compile_sm90

from . import twin

why_not = why_not_of(topk_routing)
why_not_aux = why_not_of(aux_loss_scores)

cuda = pytest.importorskip("mindspeed_lite.ops.moe_router.cuda", reason="Triton is not installed")
compiled = pytest.mark.skipif(cpu._unusable() is not None, reason=str(cpu._unusable()))
kernels = pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "triton"])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = ["probs", "dlogits"]
Tensors = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def on(backend: str, function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The public function on a backend; "triton" is the CUDA backend's on CPU tensors."""

    def run(*arguments: Any, **options: Any) -> Tensors:
        if backend == "triton":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OPERATOR, "choose", lambda case: cuda.moe_router)
                return function(*arguments, **options)
        with force("moe_router", backend):
            return function(*arguments, **options)

    return run


# The calls that have a way of their own: each score function, the softmax at both places, groups by their best expert
# and by their two best, a bias, a factor.
FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus", "scaling_factor": 0.5},
    "biased": {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.3, 0.3, 16)[5 * torch.arange(16) % 16]},
    "groups": {"num_groups": 4, "group_topk": 2, "scaling_factor": 1.5},
    "groups by one": {"num_groups": 4, "group_topk": 4, "use_pre_softmax": True},
    "biased groups": {
        "score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5,
        "expert_bias": torch.linspace(-0.2, 0.2, 16),
    },
}  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS)
dense = pytest.mark.parametrize("dense", [False, True])


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
    probs, indices = on(REFERENCE, topk_routing)(x, 1, score_function="sigmoid", dense_output=True)
    torch.testing.assert_close(probs, torch.tensor([[s[1]]], dtype=torch.float64))
    assert indices.tolist() == [[1]] and indices.dtype == torch.int64

    for function, scores in (("softmax", e), ("sigmoid", s), ("sqrtsoftplus", r)):
        chosen, found = on(REFERENCE, aux_loss_scores)(x, 2, function)
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


@dense
@forms
def test_gradients_of_the_reference(form: str, dense: bool) -> None:
    # Far enough from each other that the choice does not change.
    logits = make(5, 16, torch.float64).requires_grad_()
    run = on(REFERENCE, topk_routing)
    assert gradcheck(lambda x: run(x, 4, dense_output=dense, **FORMS[form])[0], [logits])


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_gradients_of_the_auxiliary_scores(function: str) -> None:
    logits = make(5, 16, torch.float64).requires_grad_()
    assert gradcheck(lambda x: on(REFERENCE, aux_loss_scores)(x, 4, function)[1], [logits])


# ---- the choice ----


def megatron_choice(scores: torch.Tensor, topk: int, groups: tuple[int, int] | None) -> torch.Tensor:
    """The experts, by the operators that Megatron's group_limited_topk and topk_routing call."""
    if groups is None:
        return torch.topk(scores, k=topk, dim=1).indices
    number, chosen = groups
    tokens, experts = scores.shape
    worth = scores.view(tokens, number, -1).topk(topk // chosen, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(worth).scatter_(1, torch.topk(worth, k=chosen, dim=-1, sorted=False)[1], 1)
    wide = mask.unsqueeze(-1).expand(tokens, number, experts // number).reshape(tokens, -1)
    return torch.topk(scores.masked_fill(~wide.bool(), float("-inf")), k=topk, dim=-1)[1]


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
        experts = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 256, 300, 512, 1024])))
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
    _, indices = run(x, topk, dense_output=True, **options)
    assert torch.equal(indices, expected)
    _, chosen = run(x, topk, **options)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, expected, True))
    _, plain = on(REFERENCE, topk_routing)(x, topk, dense_output=True, **options)
    assert torch.equal(indices, plain)


@compiled
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 96, 128, 160, 256, 384, 512, 1024, 2048])
def test_every_size_chooses_as_torch_does(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    run = on("cpu", topk_routing)
    for topk in sorted({1, 2, 4, 6, 7, 8, 9, 15, 16, 30, 31, 32, 64, experts - 1, experts}):
        if not 1 <= topk <= experts:
            continue
        for highest in (2, 5, 300, 1 << 24):
            x = torch.randint(0, highest, (12, experts), generator=generator).float()
            assert torch.equal(run(x, topk, dense_output=True)[1], torch.topk(x, topk, dim=1).indices), (topk, highest)


@compiled
def test_groups_of_16_bit_logits_are_judged_by_rounded_sums() -> None:
    """As torch.sum rounds: sums that differ in fp32 are equal then, and another group may be taken."""
    x = make(4096, 64, torch.bfloat16)
    options = {"num_groups": 8, "group_topk": 2, "dense_output": True}
    ours = on("cpu", topk_routing)(x, 4, **options)[1]
    assert torch.equal(ours, megatron_choice(x, 4, (8, 2)))
    assert not torch.equal(ours, megatron_choice(x.float(), 4, (8, 2)))


@compiled
@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auxiliary_scores_are_those_of_torch_bit_by_bit_and_so_is_the_choice(function: str, dtype: torch.dtype) -> None:
    for x in (make(200, 64, dtype), make(50, 8, dtype, size=30.0), torch.zeros(3, 16, dtype=dtype)):
        ours, theirs = (on(backend, aux_loss_scores)(x, 5, function) for backend in ("cpu", REFERENCE))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert ours[0].dtype == torch.bool and ours[1].dtype == torch.float32
        assert torch.equal(ours[0], torch.zeros_like(ours[0]).scatter(1, torch.topk(ours[1], 5, dim=1).indices, True))


def test_a_library_that_chooses_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu._refusal.cache_clear()
    real = torch.topk
    monkeypatch.setattr(torch, "topk", lambda x, k, dim: real(x + torch.linspace(0, 0.1, x.shape[1]), k, dim=dim))
    try:
        if cpu._lib.unusable() is None:
            assert "otherwise than torch.topk" in str(cpu._unusable())
    finally:
        cpu._refusal.cache_clear()


# ---- how exact it is ----


def probs_of(backend: str, topk: int, dense: bool, form: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: on(backend, topk_routing)(x, topk, dense_output=dense, **FORMS[form])[0]


def scores_of(backend: str, function: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: on(backend, aux_loss_scores)(x, 4, function)[1]


@kernels
@dense
@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_not_above_that_of_torch(form: str, dense: bool, dtype: torch.dtype, backend: str) -> None:
    for tokens, topk in ((90, 4), (1, 4), (33, 5)):
        x = make(tokens, 16, dtype)
        theirs = probs_of(REFERENCE, topk, dense, form)
        dprobs = make(tokens, topk if dense else 16, dtype, seed=1)
        got = forward_backward(probs_of(backend, topk, dense, form), [x], dprobs)
        replaced = forward_backward(theirs, [x], dprobs)
        # By the choice that was made: in float64 some experts change places.
        by = on(REFERENCE, topk_routing)(x, topk, dense_output=True, **FORMS[form])[1]
        exact = forward_backward(exactly(by, topk, dense, form), [x], dprobs, torch.float64)
        slack = 4 * torch.finfo(torch.float32).eps
        if dtype == torch.bfloat16 and (backend == "triton" or tokens == 1):
            slack += torch.finfo(dtype).eps  # its interpreter cuts off where a GPU rounds; few numbers do not average
        assert_not_worse(got, replaced, exact, slack, NAMES)


def exactly(indices: torch.Tensor, topk: int, dense: bool, form: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The probabilities of a given choice."""
    options = FORMS[form]

    def run(x: torch.Tensor) -> torch.Tensor:
        function = options.get("score_function", "softmax")
        if function == "softmax":
            p = x.softmax(-1).gather(1, indices) if options.get("use_pre_softmax") else x.gather(1, indices).softmax(-1)
        else:
            s = x.sigmoid() if function == "sigmoid" else torch.nn.functional.softplus(x).sqrt()
            p = s.gather(1, indices)
            p = p / p.sum(-1, keepdim=True)
        p = p * options.get("scaling_factor", 1.0)
        return p if dense else torch.zeros_like(x).scatter(1, indices, p)

    return run


@kernels
@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_auxiliary_gradients_is_not_above_that_of_torch(
    function: str, dtype: torch.dtype, backend: str
) -> None:
    for tokens, experts in ((300, 64), (7, 9), (1, 130)):
        x, dscores = make(tokens, experts, dtype), make(tokens, experts, torch.float32, seed=3)

        exact = forward_backward(scores_of(REFERENCE, function), [x], dscores, torch.float64)
        got, replaced = (forward_backward(scores_of(each, function), [x], dscores) for each in (backend, REFERENCE))
        cut = torch.finfo(dtype).eps if dtype == torch.bfloat16 and backend == "triton" else 0.0
        assert_not_worse(got, replaced, exact, cut + 1e-6, ["scores", "dlogits"])


@kernels
@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
def test_scores_far_from_zero_have_the_gradient_of_their_limit(function: str, backend: str) -> None:
    x = torch.tensor([[-200.0, -60.0, -12.0, -3.0, 0.0, 4.0, 19.9, 20.1]])
    x = torch.cat([x, x.flip(1)]).requires_grad_()
    probs, _ = on(backend, topk_routing)(x, 8, score_function=function)
    (found,) = torch.autograd.grad(probs, x, torch.arange(16.0).view(2, 8))
    wide = x.detach().double().requires_grad_()
    probs, _ = on(REFERENCE, topk_routing)(wide, 8, score_function=function)
    (exact,) = torch.autograd.grad(probs, wide, torch.arange(16.0).view(2, 8))
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-7)
    _, scores = on(backend, aux_loss_scores)(x, 2, function)
    (found,) = torch.autograd.grad(scores, x, torch.arange(16.0).view(2, 8))
    _, scores = on(REFERENCE, aux_loss_scores)(wide, 2, function)
    (exact,) = torch.autograd.grad(scores, wide, torch.arange(16.0).view(2, 8))
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=1e-7)


# ---- shapes, strides, what is kept ----


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    topk=st.integers(1, 12),
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_shapes_and_dtypes(tokens: int, topk: int, form: str, dtype: torch.dtype, dense: bool, seed: int) -> None:
    options = FORMS[form]
    topk = max(topk, options.get("group_topk", 1))
    topk = min(topk, 4 * options.get("group_topk", 4))
    if tokens == 0 and "num_groups" in options and dtype == torch.float16:
        tokens = 1
    x = make(tokens, 16, dtype, seed).requires_grad_()
    probs, chosen = topk_routing(x, topk, dense_output=dense, **options)
    assert probs.dtype == dtype and not chosen.requires_grad
    assert probs.shape == chosen.shape == (tokens, topk if dense else 16)
    assert chosen.dtype == (torch.int64 if dense else torch.bool)
    probs.sum().backward()  # whose gradient has no memory of its own
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == dtype
    if not dense:
        assert (chosen.sum(1) == topk).all() and not (probs * ~chosen).any()
    with torch.no_grad():
        again, which = topk_routing(x, topk, **options)
        both, with_gradients = topk_routing(x.clone(), topk, **options)
    assert torch.equal(again, both) and torch.equal(which, with_gradients)


@kernels
@forms
def test_strides_do_not_matter(form: str, backend: str) -> None:
    base = make(12, 16, torch.float32)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.t().contiguous().t(),
        "a part": lambda x: torch.cat([x, x], 1)[:, :16],
        "every other column": lambda x: torch.stack([x, x], -1)[..., 0],
        "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
        "one row for all": lambda x: x[:1].expand(12, 16),
    }
    for view, dense in itertools.product(views.values(), (False, True)):
        dprobs = torch.arange(1.0, 5.0 if dense else 17.0).expand(12, -1)
        got, want = (
            forward_backward(lambda x: probs_of(each, 4, dense, form)(view(x)), [base], dprobs)  # noqa: B023
            for each in (backend, REFERENCE)
        )
        assert error(got[0], want[0]) < 1e-6
        assert error(got[1], want[1]) < 1e-5


@kernels
def test_strides_of_the_gradients_do_not_matter(backend: str) -> None:
    x = make(12, 16, torch.float32).requires_grad_()
    g = make(12, 16, torch.float32, seed=2)
    views = (g.t().contiguous().t(), torch.stack([g, g], -1)[..., 0], g[:1].expand(12, 16))
    results = [probs_of(backend, 4, False, form)(x) for form in FORMS]
    results += [scores_of(backend, function)(x) for function in SCORE_FUNCTIONS]
    for result, view in itertools.product(results, views):
        found, want = (torch.autograd.grad(result, x, each, retain_graph=True) for each in (view, view.contiguous()))
        assert torch.equal(found[0], want[0])


@kernels
@forms
def test_little_is_kept(form: str, backend: str) -> None:
    x = make(40, 16, torch.float32).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        on(backend, topk_routing)(x, 4, **FORMS[form])
    indices, numbers = kept
    assert indices.shape == (40, 4)
    if FORMS[form].get("use_pre_softmax"):
        assert numbers.data_ptr() == x.data_ptr()
    else:
        assert numbers.shape == (40, 4) and numbers.dtype == torch.float32


@compiled
def test_auxiliary_scores_keep_themselves() -> None:
    x = make(40, 16, torch.bfloat16).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, scores = on("cpu", aux_loss_scores)(x, 4, "sigmoid")
    assert kept[0].data_ptr() == scores.data_ptr() and [t.numel() for t in kept] == [640, 40]


def test_the_gradient_of_the_loss_is_one_row() -> None:
    scores = make(40, 16, torch.float32).softmax(-1).requires_grad_()
    loss = load_balancing_loss(scores, torch.arange(16), 40, 2, 16, 0.1)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.shape == (40, 16) and gradient.stride() == (0, 1)


@compiled
@forms
def test_the_number_of_threads_changes_no_bit(form: str) -> None:
    if form == "sqrtsoftplus":
        pytest.skip("of PyTorch's softplus, by which is chosen, it does")
    x, dprobs = make(5000, 16, torch.float32), make(5000, 16, torch.float32, seed=1)
    one = forward_backward(probs_of("cpu", 4, False, form), [x], dprobs)
    torch.set_num_threads(3)
    many = forward_backward(probs_of("cpu", 4, False, form), [x], dprobs)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@compiled
def test_logits_changed_between_the_passes_are_autograds_error() -> None:
    x = make(4, 16, torch.float32).requires_grad_() * 1
    probs, _ = topk_routing(x, 2, use_pre_softmax=True)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probs.sum().backward()


# ---- the NPU path on an emulation of torch_npu ----

ON_NPU = ["pre-softmax", "sigmoid", "biased", "biased groups"]


@dense
@pytest.mark.parametrize("form", ON_NPU)
def test_the_npu_path_computes_it(npu_twin: list[twin.Call], form: str, dense: bool) -> None:
    for dtype, tokens in itertools.product(DTYPES, (0, 1, 40)):
        x = make(tokens, 16, dtype)
        dprobs = make(tokens, 4 if dense else 16, dtype, seed=1)
        _, chosen = on("npu", topk_routing)(x, 4, dense_output=dense, **FORMS[form])
        _, by = on(REFERENCE, topk_routing)(x, 4, dense_output=True, **FORMS[form])
        assert torch.equal(chosen, by if dense else torch.zeros_like(chosen).scatter(1, by, True))
        got = forward_backward(probs_of("npu", 4, dense, form), [x], dprobs)
        exact = forward_backward(exactly(by, 4, dense, form), [x], dprobs, torch.float64)
        for ours, truth in zip(got, exact, strict=True):
            assert ours.dtype == dtype and error(ours, truth) <= bound(dtype, 16, roundings=2)
    want = "npu_moe_gating_top_k" + ("_softmax" if form == "pre-softmax" else "")
    assert {call.function for call in npu_twin} == {want}


def test_the_npu_path_judges_groups_by_one_or_two(npu_twin: list[twin.Call]) -> None:
    x = make(50, 32, torch.float32)
    for number, taken, topk in ((4, 4, 4), (4, 2, 4), (8, 3, 6), (2, 1, 1 + 1)):
        options = {"score_function": "sigmoid", "num_groups": number, "group_topk": taken}
        ours, theirs = (on(backend, topk_routing)(x, topk, **options) for backend in ("npu", REFERENCE))
        assert torch.equal(ours[1], theirs[1]) and error(ours[0], theirs[0]) < 1e-6
    assert len(npu_twin) == 4


def test_the_npu_path_has_a_reason_for_what_torch_npu_has_no_operator_for(npu_twin: list[twin.Call]) -> None:
    x = torch.zeros(2, 64)
    refused: dict[str, tuple[int, dict[str, Any]]] = {
        "softmax of the chosen logits": (2, {}),
        "sqrtsoftplus": (2, {"score_function": "sqrtsoftplus"}),
        "has no groups": (2, {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2}),
        "one expert for a token": (1, {"score_function": "sigmoid"}),
        "3 best": (6, {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2}),
        "32 groups of 2 experts": (2, {"score_function": "sigmoid", "num_groups": 32, "group_topk": 2}),
    }
    with force("moe_router", "npu"):
        for words, (topk, options) in refused.items():
            (reason,) = why_not(x, topk, **options)
            assert words in reason
        (reason,) = why_not_aux(x, 2, "softmax")
        assert "not normalised" in reason
        assert "2048" in why_not(torch.zeros(2, 2080), 2, score_function="sigmoid")[0]
        assert "1024" in why_not(torch.zeros(2, 2080), 1025, use_pre_softmax=True)[0]
        assert "float64" in why_not(x.double(), 2, use_pre_softmax=True)[0]
        with pytest.raises(RuntimeError, match="cannot serve"):
            topk_routing(x, 2)
    assert npu_twin == []


def test_the_twin_notices_wrong_calls() -> None:
    from .twin.moe_router import npu_moe_gating_top_k, npu_moe_gating_top_k_softmax

    x = torch.zeros(2, 64)
    for wrong in (
        lambda: npu_moe_gating_top_k(x, 65, norm_type=1),
        lambda: npu_moe_gating_top_k(x, 17, norm_type=1, group_count=4),
        lambda: npu_moe_gating_top_k(x, 2, norm_type=1, group_count=32, k_group=2),
        lambda: npu_moe_gating_top_k(x, 2, norm_type=1, renorm=1),
        lambda: npu_moe_gating_top_k(x.bfloat16(), 2, bias=torch.zeros(64), norm_type=1),
        lambda: npu_moe_gating_top_k(x.double(), 2, norm_type=1),
        lambda: npu_moe_gating_top_k_softmax(x, k=65),
        lambda: npu_moe_gating_top_k_softmax(x.double(), k=6),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        npu_moe_gating_top_k(x, 2, None)  # type: ignore[misc]
    assert npu_moe_gating_top_k(x, 2, norm_type=1)[1].tolist() == [[0, 1]] * 2
    assert npu_moe_gating_top_k(x, 2, norm_type=0)[0].isnan().all()


# ---- Triton ----


@settings(max_examples=15)  # the interpreter takes its time
@given(
    tokens=st.integers(0, 40),
    experts=st.sampled_from([1, 3, 8, 16, 60, 130]),
    most=st.sampled_from([1, 2, 7, 8]),
    function=st.sampled_from([*SCORE_FUNCTIONS, "pre_softmax"]),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
)
def test_triton_kernels_agree_with_the_reference(
    tokens: int, experts: int, most: int, function: str, dtype: torch.dtype, dense: bool
) -> None:
    x, topk = make(tokens, experts, dtype), min(most, experts)
    dprobs = make(tokens, topk if dense else experts, dtype, seed=1)
    pre = function == "pre_softmax"
    options = {"score_function": "softmax" if pre else function, "use_pre_softmax": pre, "dense_output": dense}
    ours, theirs = (on(each, topk_routing)(x, topk, **options) for each in ("triton", REFERENCE))
    assert torch.equal(ours[1], theirs[1]) and ours[0].dtype == dtype
    got, want = (
        forward_backward(lambda x: on(each, topk_routing)(x, topk, **options)[0], [x], dprobs)  # noqa: B023
        for each in ("triton", REFERENCE)
    )
    for a, b in zip(got, want, strict=True):
        # Differences of the scores that are left; the interpreter cuts to bfloat16 where a GPU rounds.
        assert_within(a, b, bound(dtype, 40, roundings=4), magnitude=0.1 * dprobs.double().norm().item())


@pytest.mark.parametrize(("experts", "topk"), [(64, 6), (256, 8)])
def test_triton_kernels_keep_everything_in_registers_of_an_h100(experts: int, topk: int) -> None:
    tile = launch(experts)
    shape = {"EXPERTS": experts, "ROWS": tile.rows, "BLOCK": tile.block}
    chosen = {**shape, "TOPK": topk, "KBLOCK": 8, "DENSE": False}
    module = "mindspeed_lite.ops.moe_router.kernels"
    numbers = {"rows": "i32", "stride": "i32"}
    with_scale = {**numbers, "scale": "fp32", "indices": "*i64"}
    found = [
        compile_sm90(
            f"{module}:forward_kernel",
            {**with_scale, "scores": "*fp32", "probs": "*bf16", "chosen": "*i1", "kept": "*fp32"},
            {**chosen, "SCORES": "sigmoid", "NORMALISED": True, "KEEPS": True},
            num_warps=tile.warps,
        ),
        compile_sm90(
            f"{module}:backward_kernel",
            {**with_scale, "dprobs": "*bf16", "kept": "*fp32", "dlogits": "*bf16"},
            {**chosen, "SCORES": "sqrtsoftplus", "NORMALISED": True},
            num_warps=tile.warps,
        ),
        compile_sm90(
            f"{module}:backward_all_kernel",
            {**with_scale, "dprobs": "*bf16", "logits": "*bf16", "dlogits": "*bf16", "logits_stride": "i32"},
            chosen,
            num_warps=tile.warps,
        ),
        compile_sm90(
            f"{module}:backward_scores_kernel",
            {**numbers, "dscores": "*fp32", "scores": "*fp32", "sums": "*fp32", "dlogits": "*bf16"},
            {**shape, "SCORES": "sqrtsoftplus"},
            num_warps=tile.warps,
        ),
    ]
    # 65536 registers: at 128 for each of a program's 128 threads, four such programs share a multiprocessor.
    assert all(each.spills == 0 and each.registers <= 128 for each in found), found


def test_what_the_triton_kernels_do_not_take_has_a_reason() -> None:
    assert "float64" in cuda.supported(Case("cuda", torch.float64, "aux_loss_scores", 8))[0]
    assert "20000 experts" in cuda.supported(Case("cuda", torch.bfloat16, "aux_loss_scores", 20000))[0]
    assert cuda.supported(Case("cuda", torch.float16, "aux_loss_scores", 8)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@dense
@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda(form: str, dense: bool, dtype: torch.dtype) -> None:
    x, dprobs = make(129, 16, dtype).cuda(), make(129, 4 if dense else 16, dtype, seed=1).cuda()
    options = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in FORMS[form].items()}
    results = []
    for backend in ("cuda", REFERENCE):
        leaf = x.clone().requires_grad_()
        probs, chosen = on(backend, topk_routing)(leaf, 4, dense_output=dense, **options)
        probs.backward(dprobs)
        results.append((probs, chosen, leaf.grad))
    ours, theirs = results
    assert torch.equal(ours[1], theirs[1])
    for a, b in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        assert error(a.cpu(), b.cpu()) <= torch.finfo(dtype).eps + 1e-6


# ---- which backend, and what is refused ----


def test_what_the_cpu_kernel_does_not_take_has_a_reason() -> None:
    x = torch.zeros(4, 64)
    assert "float16" in why_not(x.half(), 2)[0] and "float64" in why_not_aux(x.double(), 2, "softmax")[0]
    (reason,) = why_not(x, 6, num_groups=8, group_topk=2)
    assert "3 best" in reason
    probs, chosen = topk_routing(x, 6, num_groups=8, group_topk=2)
    assert (chosen.sum(1) == 6).all() and torch.allclose(probs.sum(1), torch.ones(4))
    if cpu._unusable() is None:
        assert why_not(x, 2) == [] and why_not_aux(x, 2, "sigmoid") == []


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_lib", native.Library(cpu._lib.source, cpu._lib.functions))
    monkeypatch.setattr(cpu._lib, "_state", "no C++ compiler")
    cpu._refusal.cache_clear()
    OPERATOR._chosen.clear()
    try:
        x = make(4, 16, torch.float32)
        assert why_not(x, 2) == why_not_aux(x, 2, "softmax") == ["no C++ compiler"]
        assert topk_routing(x, 2)[0].shape == (4, 16)
    finally:
        cpu._refusal.cache_clear()
        OPERATOR._chosen.clear()


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
    with pytest.raises(ValueError, match=words):
        why_not(torch.zeros(shape), topk, **options)


def test_integers_are_no_logits_and_counts_are_for_experts() -> None:
    with pytest.raises(ValueError, match="of numbers"):
        topk_routing(torch.zeros(4, 8, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="topk 9"):
        aux_loss_scores(torch.zeros(4, 8), 9, "softmax")
    with pytest.raises(ValueError, match=r"tokens_per_expert \[E\]"):
        load_balancing_loss(torch.zeros(4, 8), torch.zeros(4), 4, 2, 8, 0.1)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3, 16, dtype=torch.bfloat16, requires_grad=True)
        probs, chosen = topk_routing(x, 2, score_function="sigmoid", expert_bias=torch.zeros(16))
        probs.backward(torch.zeros_like(probs))
        which, scores = aux_loss_scores(x, 2, "softmax")
    assert probs.shape == chosen.shape == which.shape == scores.shape == (3, 16) and probs.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("first", ["fake", "compiled"])
def test_the_first_call_may_be_one_without_memory(first: str) -> None:
    """When the choice of the kernel is looked at."""
    code = {
        "fake": "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode(): topk_routing(torch.zeros(3, 16), 2)\n",
        "compiled": "torch.compile(lambda x: topk_routing(x * 1.0, 2)[0], backend='aot_eager')(torch.randn(3, 16))\n",
    }[first]
    code = f"import torch\nfrom mindspeed_lite.ops.moe_router import topk_routing\n{code}"
    code += "from mindspeed_lite.ops.moe_router import cpu\nfrom tests.harness.reasons import why_not_of\n"
    code += "why_not = why_not_of(topk_routing)\n"
    code += "assert why_not(torch.zeros(3, 16), 2) in ([], [cpu._lib.unusable()]), why_not(torch.zeros(3, 16), 2)\n"
    ran = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.filterwarnings("ignore")
def test_it_compiles() -> None:
    x, dprobs = make(6, 16, torch.float32), make(6, 16, torch.float32, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: topk_routing(x * 1.0, 4, score_function="sigmoid")[0], backend="aot_eager")
    for ours, truth in zip(
        forward_backward(compiled, [x], dprobs),
        forward_backward(probs_of(REFERENCE, 4, False, "sigmoid"), [x], dprobs, torch.float64),
        strict=True,
    ):
        assert error(ours, truth) < 1e-6
