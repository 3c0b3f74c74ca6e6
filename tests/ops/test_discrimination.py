"""Every operator, backend and dtype: right results are within the bound of `tests.harness`, wrong ones are not."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.activation import KINDS, activation
from mindspeed_lite.ops.adamw import adamw
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add
from mindspeed_lite.ops.cross_entropy import cross_entropy
from mindspeed_lite.ops.grouped_matmul import grouped_matmul
from mindspeed_lite.ops.layer_norm import layer_norm
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed_lite.ops.masked_softmax import masked_softmax
from mindspeed_lite.ops.moe_router import aux_loss_scores, topk_routing
from mindspeed_lite.ops.permute import permute, unpermute
from mindspeed_lite.ops.rms_norm import rms_norm
from mindspeed_lite.ops.rope import PAIRS, rope
from mindspeed_lite.ops.rope.angles import cos_sin
from tests.harness import errors
from tests.harness.compare import one_thread

# Triton's interpreter takes a tenth of a second for a call.
DRAWS = {"reference": 60, "cpu": 100, "npu": 100, "cuda": 8}
REJECTED = 0.99
# The kernels of NPUs take factors and partial results in the inputs' dtype: so many roundings more.
NPU_ROUNDINGS = {"activation": 2}
NOT_HERE = {
    # torch's own operator for CUDA.
    ("accumulate_wgrad", "cuda"),
    # torch's own operator for NPUs, of which the CPU's sums the gradient of bias in 16 bit.
    ("layer_norm", "npu"),
}


@dataclass
class Problem:
    """One drawn call.

    Attributes:
        inputs: floating tensors; the first `differentiable` of them get gradients.
        call: a function of the inputs that returns the output, or outputs by name.
        terms: length of the longest sum in any result.
        roundings: to the dtype, one after another, in any result.
        rounds_within: intermediate results are rounded to the dtype, so that results in a wider one are no more exact.
        magnitudes: the norm against which a result is measured whose terms cancel.
    """

    inputs: list[torch.Tensor]
    call: Callable[..., Any]
    terms: int
    differentiable: int = -1
    roundings: int = 1
    rounds_within: bool = False
    magnitudes: dict[str, float] = field(default_factory=dict)


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def size(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=self.generator))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.size(0, len(choices) - 1)]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator)


def draw_rms_norm(draw: Draw) -> Problem:
    rows, width = draw.size(2, 40), draw.size(8, 96)
    return Problem([draw.normal(rows, width), draw.normal(width)], rms_norm, max(rows, width))


def draw_layer_norm(draw: Draw) -> Problem:
    rows, width = draw.size(2, 40), draw.size(8, 96)
    return Problem([draw.normal(rows, width), draw.normal(width), draw.normal(width)], layer_norm, max(rows, width))


def draw_activation(draw: Draw) -> Problem:
    rows, width, kind = draw.size(8, 40), 2 * draw.size(8, 48), draw.one_of(KINDS)
    return Problem(
        [draw.normal(rows, width), draw.normal(width)], lambda x, bias: activation(x, kind, bias), max(rows, width)
    )


def draw_rope(draw: Draw) -> Problem:
    s, b, n, half = draw.size(4, 16), draw.size(1, 2), draw.size(1, 4), draw.size(4, 24)
    pairs = draw.one_of(PAIRS)
    angles = torch.arange(s)[:, None] * 100.0 ** -torch.linspace(0, 1, half)
    both = torch.stack((angles, angles), -1).flatten(-2) if pairs == "interleaved" else torch.cat((angles, angles), -1)
    cos, sin = cos_sin(both[:, None, None])
    return Problem([draw.normal(s, b, n, 2 * half)], lambda x: rope(x, cos, sin, pairs=pairs), 2)


def draw_cross_entropy(draw: Draw) -> Problem:
    rows, vocabulary = draw.size(8, 40), draw.size(16, 96)
    target, smoothing = draw.integers(vocabulary, rows), draw.one_of([0.0, 0.1])
    return Problem(
        [draw.normal(rows, vocabulary)],
        lambda x: cross_entropy(x * 1, target, label_smoothing=smoothing),
        vocabulary,
    )


def draw_linear_cross_entropy(draw: Draw) -> Problem:
    rows, hidden, vocabulary = draw.size(8, 40), draw.size(16, 48), draw.size(16, 96)
    target = draw.integers(vocabulary, rows)
    inputs = [draw.normal(rows, hidden), (draw.normal(vocabulary, hidden) / hidden**0.5).to(draw.dtype)]
    return Problem(
        inputs,
        lambda h, w: linear_cross_entropy(h, w, target),
        vocabulary,
        roundings=2,
        rounds_within=True,
    )


def draw_grouped_matmul(draw: Draw) -> Problem:
    experts, k, n = draw.size(2, 4), draw.size(8, 40), draw.size(8, 40)
    counts = torch.tensor([draw.size(1, 20) for _ in range(experts)])
    inputs = [draw.normal(int(counts.sum()), k), *(draw.normal(n, k) for _ in range(experts))]
    return Problem(inputs, lambda x, *weights: grouped_matmul(x, weights, counts), max(k, n, 20))


def routing(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A map [T, E] with as many experts for each token, probs, and that number."""
    tokens, experts, topk = draw.size(8, 40), draw.size(3, 8), draw.size(1, 3)
    ranks = torch.rand(tokens, experts, generator=draw.generator).argsort(-1)
    return ranks < topk, torch.rand(tokens, experts, generator=draw.generator) + 0.1, topk


def draw_permute(draw: Draw) -> Problem:
    routed, probs, topk = routing(draw)

    def call(tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        permuted, permuted_probs, _ = permute(tokens, routed, probs, topk=topk)
        assert permuted_probs is not None
        return {"permuted": permuted, "permuted probs": permuted_probs}

    return Problem([draw.normal(len(routed), draw.size(8, 48)), probs], call, topk)


def draw_unpermute(draw: Draw) -> Problem:
    routed, probs, topk = routing(draw)
    width = draw.size(8, 48)

    def call(permuted: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        row_ids = permute(torch.zeros(len(routed), width, dtype=permuted.dtype), routed, topk=topk)[2]
        return unpermute(permuted, row_ids, (len(routed), width), probs, routed)

    # Probs may be fp32 beside 16-bit rows: some paths round the products of rows to their dtype.
    return Problem([draw.normal(len(routed) * topk, width), probs], call, width, roundings=2, rounds_within=True)


def distinct_logits(draw: Draw) -> torch.Tensor:
    """[T, E] without equal scores in a row."""
    tokens, experts = draw.size(8, 40), draw.size(4, 32)
    ranks = torch.rand(tokens, experts, generator=draw.generator).argsort(-1)
    return (ranks * (6 / experts) - 3).to(draw.dtype)


def draw_moe_router(draw: Draw) -> Problem:
    logits, topk = distinct_logits(draw), draw.size(2, 4)
    scores, pre = draw.one_of(["softmax", "sigmoid"]), draw.one_of([True, False])

    def call(logits: torch.Tensor) -> torch.Tensor:
        return topk_routing(logits, topk, score_function=scores, use_pre_softmax=pre)[0]

    return Problem([logits], call, logits.shape[-1])


def draw_aux_loss_scores(draw: Draw) -> Problem:
    logits, topk, scores = distinct_logits(draw), draw.size(1, 4), draw.one_of(["softmax", "sigmoid"])
    return Problem([logits], lambda logits: aux_loss_scores(logits, topk, scores)[1], logits.shape[-1])


def draw_masked_softmax(draw: Draw) -> Problem:
    n = draw.size(1, 3)
    sq = draw.one_of([32, 48, 64])
    causal = draw.one_of([True, False])
    return Problem([draw.normal(2, n, sq, sq)], lambda x: masked_softmax(x, causal=causal, scale=0.5), sq)


def draw_bias_dropout_add(draw: Draw) -> Problem:
    rows, width = draw.size(8, 40), draw.size(8, 96)
    inputs = [draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)]
    # The reference rounds x + bias.
    return Problem(inputs, bias_dropout_add, rows, roundings=2)


def draw_accumulate_wgrad(draw: Draw) -> Problem:
    rows, n, k = draw.size(8, 64), draw.size(8, 40), draw.size(8, 40)
    wide = draw.dtype if draw.one_of([True, False]) else torch.float32
    inputs = [draw.normal(n, k, dtype=wide), draw.normal(rows, n), draw.normal(rows, k)]
    # The reference rounds the product before it is added.
    return Problem(
        inputs,
        lambda main, dy, x: accumulate_wgrad(main.clone(), dy, x),
        rows,
        differentiable=0,
        roundings=2,
        rounds_within=True,
    )


def draw_adamw(draw: Draw) -> Problem:
    size = draw.size(16, 400)
    param, first, second = (draw.normal(size, dtype=torch.float32) for _ in range(3))
    rule: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}

    def call(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        p, m, v, g = (t.clone() for t in given)
        adamw([p], [g], [m], [v], **rule)
        return {"update": p.double() - given[0].double(), "exp_avg": m, "exp_avg_sq": v}

    # An update is as exact as the sum that it is taken from.
    sizes = {"update": param.double().norm().item()}
    return Problem([param, first, second.square(), draw.normal(size)], call, 4, differentiable=0, magnitudes=sizes)


PROBLEMS: dict[str, tuple[str, Callable[[Draw], Problem]]] = {
    "accumulate_wgrad": ("accumulate_wgrad", draw_accumulate_wgrad),
    "activation": ("activation", draw_activation),
    "adamw": ("adamw", draw_adamw),
    "aux_loss_scores": ("moe_router", draw_aux_loss_scores),
    "bias_dropout_add": ("bias_dropout_add", draw_bias_dropout_add),
    "cross_entropy": ("cross_entropy", draw_cross_entropy),
    "grouped_matmul": ("grouped_matmul", draw_grouped_matmul),
    "layer_norm": ("layer_norm", draw_layer_norm),
    "linear_cross_entropy": ("linear_cross_entropy", draw_linear_cross_entropy),
    "masked_softmax": ("masked_softmax", draw_masked_softmax),
    "moe_router": ("moe_router", draw_moe_router),
    "permute": ("permute", draw_permute),
    "rms_norm": ("rms_norm", draw_rms_norm),
    "rope": ("rope", draw_rope),
    "unpermute": ("permute", draw_unpermute),
}


@contextlib.contextmanager
def on(operator: str, backend: str) -> Iterator[None]:
    """Within the block `operator` runs on `backend`; a Triton kernel runs interpreted, on tensors of the CPU."""
    if backend != "cuda":
        with dispatch.force(operator, backend):
            yield
        return
    found = dispatch.operator(operator)
    module = importlib.import_module(f"{dispatch.OPERATORS[operator]}.cuda")
    with pytest.MonkeyPatch.context() as patch:
        chosen: list[Any] = []

        def choose(case: Any) -> Any:
            chosen.append(case)
            return getattr(module, operator)

        patch.setattr(found, "choose", choose)
        yield
        assert chosen


def results(problem: Problem, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name, computed from copies of the inputs in `dtype` (their own by default)."""
    count = problem.differentiable if problem.differentiable >= 0 else len(problem.inputs)
    leaves = [t.detach().to(dtype or t.dtype).clone().requires_grad_(i < count) for i, t in enumerate(problem.inputs)]
    found = problem.call(*leaves)
    outputs: dict[str, torch.Tensor] = found if isinstance(found, dict) else {"output": found}
    if count:
        generator = torch.Generator().manual_seed(1)
        # Numbers that every dtype has.
        sent = [torch.randn(t.shape, generator=generator).bfloat16().half().to(t.dtype) for t in outputs.values()]
        gradients = torch.autograd.grad(list(outputs.values()), leaves[:count], sent)
        named = {f"gradient of input {number}": each for number, each in enumerate(gradients, 1)}
        outputs = {**outputs, **named}
    return {name: each.detach() for name, each in outputs.items()}


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if torch.finfo(a).eps > torch.finfo(b).eps else b


def backends() -> Iterator[Any]:
    for name, (operator, _) in PROBLEMS.items():
        for backend in ("reference", *dispatch.operator(operator).backends):
            if (operator, backend) in NOT_HERE:
                continue
            # Triton's interpreter cuts bfloat16 off where hardware rounds it.
            dtypes = (torch.float16 if backend == "cuda" else torch.bfloat16, torch.float32)
            for dtype in dtypes:
                yield pytest.param(name, backend, dtype, id=f"{name}-{backend}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("name", "backend", "dtype"), backends())
@pytest.mark.usefixtures("npu_twin", "triton_runs")
def test_right_results_are_accepted_and_wrong_ones_are_not(name: str, backend: str, dtype: torch.dtype) -> None:
    operator, draw_problem = PROBLEMS[name]
    if backend != "cuda" and dispatch.operator(operator).unusable(backend):
        pytest.skip(str(dispatch.operator(operator).unusable(backend)))
    if backend == "cuda" and torch.cuda.is_available():
        pytest.skip("Triton's kernels are not interpreted here, and take no tensors of the CPU")
    tried: dict[tuple[str, str], int] = {}
    accepted: dict[tuple[str, str], int] = {}
    served, refusal = 0, ""
    for number in range(DRAWS[backend]):
        draw = Draw(zlib.crc32(f"{name} {number}".encode()), dtype)
        problem = draw_problem(draw)
        with one_thread():
            with dispatch.force(operator, dispatch.REFERENCE):
                exact = results(problem, torch.float64)
            try:
                with on(operator, backend):
                    got = results(problem, None)
            except RuntimeError as error:
                if "is forced and cannot serve" not in str(error):
                    raise
                refusal = str(error)
                continue
        served += 1
        for each, truth in exact.items():
            ours = got[each]
            rounded_to = coarser(dtype, ours.dtype) if problem.rounds_within else ours.dtype
            if ours.dtype == torch.float64:
                rounded_to = torch.float32  # the difference of two results
            roundings = problem.roundings + (NPU_ROUNDINGS.get(operator, 1) if backend == "npu" else 0)
            allowed = errors.bound(rounded_to, problem.terms, roundings)
            magnitude = problem.magnitudes.get(each)
            errors.assert_within(ours, truth, allowed, magnitude, f"draw {number}, {each}")
            for kind, wrong in errors.mutations(ours, draw.generator):
                tried[each, kind] = tried.get((each, kind), 0) + 1
                accepted[each, kind] = accepted.get((each, kind), 0) + errors.is_within(
                    wrong, truth, allowed, magnitude
                )
    if not served:
        pytest.skip(f"{backend} serves no case of these: {refusal}")
    assert served >= DRAWS[backend] // 4
    passed = {key: f"{accepted[key]} of {tried[key]}" for key in tried if accepted[key] > (1 - REJECTED) * tried[key]}
    assert not passed, f"wrong results that the bound accepts: {passed}"


def test_what_is_no_number_or_of_another_shape_is_wrong() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert errors.is_within(torch.ones(4), exact, 1e-7)
    assert not errors.is_within(torch.tensor([1, 1, 1, torch.nan]), exact, 1.0)
    assert not errors.is_within(torch.ones(2, 2), exact, 1.0)
    assert not errors.is_within(torch.tensor([1e-3, 0, 0, 0]), 0 * exact, 1e-4)
    assert all(errors.bound(torch.bfloat16, 10_000, roundings) < 0.01 for roundings in range(1, 6))
