"""grouped_matmul: its reference against a loop of linear layers, and every other path against it in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops.grouped_matmul import (
    accumulate_weight_gradients,
    cpu,
    grouped_matmul,
    reference,
    weight_gradients,
)
from mindspeed_lite.platform import cpu_matmul
from tests.harness.compare import Sizes, assert_not_worse, error, one_thread
from tests.harness.errors import bound
from tests.harness.experts import COUNTS, DTYPES, NAMES, SLACK, Problem, loop
from tests.harness.reasons import why_not_of

why_not = why_not_of(grouped_matmul)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.zeros(3, 2), torch.ones(3, 2)]
    biases = [torch.tensor([0.0, 0.0, 1.0]), torch.ones(3), torch.zeros(3)]
    y = reference.grouped_matmul(x, weights, [2, 0, 1], biases)
    assert y.tolist() == [[1, 2, 4], [3, 4, 8], [11, 11, 11]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("function", [reference.grouped_matmul, cpu.grouped_matmul])
def test_gradcheck(function: Callable[..., torch.Tensor], counts: list[int], transposed: bool) -> None:
    problem = Problem(counts, 3, 2, torch.float64, biased=True)
    weights = [each if transposed else each.t().contiguous() for each in problem.weights]
    leaves = [each.requires_grad_() for each in (problem.x, *weights, *(problem.biases or ()))]

    def run(x: torch.Tensor, *both: torch.Tensor) -> torch.Tensor:
        return function(x, both[: len(counts)], counts, both[len(counts) :], transposed)

    assert torch.autograd.gradcheck(run, leaves)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    n=st.integers(1, 20),
    # The kernel for bf16 takes inner sizes that are multiples of 32.
    k=st.integers(1, 20) | st.sampled_from([32, 64, 96]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    has_bf16=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(counts=[0, 0], n=3, k=4, dtype=torch.bfloat16, biased=True, has_bf16=False, seed=0)
@example(counts=[1], n=1, k=1, dtype=torch.float16, biased=False, has_bf16=True, seed=0)
@example(counts=[300, 0, 1, 700], n=70, k=40, dtype=torch.bfloat16, biased=True, has_bf16=False, seed=0)
@example(counts=[300, 0, 1, 97], n=330, k=96, dtype=torch.bfloat16, biased=True, has_bf16=True, seed=0)
@example(counts=[5, 192, 8], n=65, k=2112, dtype=torch.bfloat16, biased=False, has_bf16=True, seed=0)
def test_error_is_not_above_that_of_a_loop_of_linear_layers(
    counts: list[int], n: int, k: int, dtype: torch.dtype, biased: bool, has_bf16: bool, seed: int
) -> None:
    problem = Problem(counts, n, k, dtype, biased, seed)
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(cpu_matmul, "has_bf16", lambda: has_bf16)
        got, replaced, exact = problem.run(grouped_matmul), problem.run(loop), problem.exact()
    for name, *results, cancelled in zip(NAMES[: len(got)], got, replaced, exact, problem.cancelled(), strict=True):
        assert_not_worse(*([each] for each in results), SLACK * cancelled, [name])


@pytest.mark.parametrize("transposed", [True, False])
def test_a_stacked_tensor_is_the_same_with_one_gradient(transposed: bool) -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.bfloat16)
    weights = [each if transposed else each.t().contiguous() for each in problem.weights]
    stacked = torch.stack(weights).requires_grad_()
    leaves = [each.requires_grad_() for each in weights]
    one = grouped_matmul(problem.x, stacked, problem.counts, transposed=transposed)
    other = grouped_matmul(problem.x, leaves, problem.counts, transposed=transposed)
    assert torch.equal(one, other)
    (gradient,) = torch.autograd.grad(one, stacked, problem.dy)
    gradients = torch.autograd.grad(other, leaves, problem.dy)
    assert torch.equal(gradient, torch.stack(gradients))
    assert not gradient[1].any()
    with torch.no_grad():
        assert torch.equal(grouped_matmul(problem.x, stacked, problem.counts, transposed=transposed), one)


def test_counts_may_be_a_tensor_of_the_host_or_numbers() -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.bfloat16)
    results = [
        grouped_matmul(problem.x, problem.weights, counts)
        for counts in ([3, 0, 4], (3, 0, 4), torch.tensor([3, 0, 4]), torch.tensor([3, 9, 0, 9, 4])[::2])
    ]
    assert all(torch.equal(results[0], each) for each in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_strides(dtype: torch.dtype) -> None:
    problem = Problem([5, 0, 4], 6, 8, dtype)
    expected = problem.run(grouped_matmul)
    x = problem.x.t().contiguous().t()
    weights = [torch.cat([each, each], dim=1)[:, :8] for each in problem.weights]
    weights[2] = problem.weights[2].t().contiguous().t()
    leaves = [each.requires_grad_() for each in (x, *weights)]
    y = grouped_matmul(leaves[0], leaves[1:], problem.counts)
    assert y.is_contiguous()
    dx, *dw = torch.autograd.grad(y, leaves, problem.dy.t().contiguous().t())
    for got, want in zip((y, dx, torch.stack(dw)), expected, strict=True):
        assert error(got, want) <= bound(dtype, 9, roundings=2)
    one = torch.ones(1, 1, dtype=dtype).expand(9, 6)  # the gradient of a sum
    got = torch.stack(weight_gradients(one, x.detach(), problem.counts))
    want = torch.stack(weight_gradients(one.contiguous(), problem.x, problem.counts))
    assert error(got, want) <= bound(dtype, 9, roundings=2)


@pytest.mark.parametrize("shape", [([0, 0], 3, 4), ([2, 1], 0, 4), ([2, 1], 3, 0)])
def test_nothing_to_compute(shape: tuple[list[int], int, int]) -> None:
    problem = Problem(*shape, torch.bfloat16, biased=True)
    got = problem.run(grouped_matmul)
    for ours, plain in zip(got, problem.run(loop), strict=True):
        assert torch.equal(ours, plain)


def test_weight_gradients_are_those_of_autograd() -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.float64)
    got = weight_gradients(problem.dy, problem.x, problem.counts)
    assert [each.shape for each in got] == [(6, 5)] * 3 and not any(each.requires_grad for each in got)
    torch.testing.assert_close(torch.stack(got), problem.exact()[2])
    assert weight_gradients(problem.dy, problem.x.requires_grad_(), problem.counts)[0].grad_fn is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("counts", [*COUNTS, [40, 1, 0, 300]])
def test_accumulation(dtype: torch.dtype, same: bool, stacked: bool, counts: list[int]) -> None:
    problem = Problem(counts, 40, 24, dtype)
    main_dtype = dtype if same else torch.float32
    before = torch.randn(len(counts), 40, 24, generator=torch.Generator().manual_seed(1)).to(main_dtype)
    main_grads = list(before.clone().unbind()) if stacked else [each.clone() for each in before]
    versions = [each._version for each in main_grads]
    accumulate_weight_gradients(main_grads, problem.dy, problem.x, problem.counts)
    exact = before.double() + problem.exact()[2]
    plain = before + torch.stack(weight_gradients(problem.dy, problem.x, problem.counts))
    assert error(torch.stack(main_grads), exact) <= error(plain, exact) + SLACK
    for main_grad, version, count, old in zip(main_grads, versions, counts, before, strict=True):
        assert torch.equal(main_grad, old) if count == 0 else main_grad._version > version


def test_the_same_input_gives_the_same_bits() -> None:
    problem = Problem([30, 0, 17, 1], 40, 24, torch.bfloat16, biased=True)
    for one, other in zip(problem.run(grouped_matmul), problem.run(grouped_matmul), strict=True):
        assert torch.equal(one, other)


def test_only_what_wants_a_gradient_gets_one() -> None:
    problem = Problem([3, 2], 6, 5, torch.bfloat16)
    frozen, trained = problem.weights[0], problem.weights[1].requires_grad_()
    grouped_matmul(problem.x, [frozen, trained], problem.counts).backward(problem.dy)
    assert frozen.grad is None and trained.grad is not None and problem.x.grad is None
    assert grouped_matmul(problem.x, [frozen, frozen], problem.counts).grad_fn is None


def test_one_node_of_autograd_and_nothing_kept_but_the_inputs() -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.bfloat16)
    leaves = [each.requires_grad_() for each in problem.weights]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = grouped_matmul(problem.x.requires_grad_(), leaves, problem.counts)
    assert sorted(kept) == sorted([problem.x.data_ptr(), *(each.data_ptr() for each in leaves)])
    assert {type(node[0]).__name__ for node in y.grad_fn.next_functions if node[0]} == {"AccumulateGrad"}  # type: ignore[union-attr]


def test_widening_takes_the_memory_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: False)
    problem = Problem([8] * 16, 64, 32, torch.bfloat16)
    with Sizes() as sizes:
        grouped_matmul(problem.x, problem.weights, problem.counts)
        weight_gradients(problem.dy, problem.x, problem.counts)
    assert sizes.largest == 16 * 8 * 64 * 2  # y itself


def test_a_router_does_not_choose_how_many_kernels_onednn_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    plain, met, rows = torch.mm, set(), set()

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        met.add(len(left))
        return plain(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        counts = torch.randint(0, 257, (4,), generator=generator).tolist()
        rows |= {*counts}
        problem = Problem(counts, 4, 8, torch.bfloat16)
        grouped_matmul(problem.x, problem.weights, counts)
    assert len(rows) > 100 and len(met) <= 32


@pytest.mark.parametrize("k", [7, 64])
def test_an_expert_takes_no_notice_of_rows_that_are_others(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of few sizes reads them, and writes what their experts write over."""
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    counts = [5, 0, 3, 21, 1]
    problem = Problem(counts, 6, k, torch.bfloat16, biased=True)
    good = grouped_matmul(problem.x, problem.weights, counts, problem.biases)
    bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
    for start, end in itertools.pairwise(bounds):
        x = problem.x.clone()
        x[start:end] = float("nan")
        y = grouped_matmul(x, problem.weights, counts, problem.biases)
        assert bool(y[start:end].isnan().all())
        y[start:end] = good[start:end]
        assert torch.equal(y, good)


def test_no_reason_not_to_run_on_the_cpu() -> None:
    for dtype in (*DTYPES, torch.float64):
        problem = Problem([3, 1], 6, 5, dtype, biased=True)
        assert why_not(problem.x, problem.weights, [3, 1], problem.biases) == []
        dy = problem.x.new_zeros(4, problem.weights[0].shape[0])
        assert why_not_of(accumulate_weight_gradients)(problem.weights, dy, problem.x, [3, 1]) == []
    assert "int32" in why_not(torch.zeros(2, 5, dtype=torch.int32), [torch.zeros(6, 5, dtype=torch.int32)], [2])[0]


def test_what_does_not_fit_is_an_error() -> None:
    problem = Problem([3, 1], 6, 5, torch.bfloat16, biased=True)
    x, weights, counts, biases = problem.x, problem.weights, problem.counts, problem.biases
    assert biases is not None
    wrong: list[tuple[str, tuple[object, ...]]] = [
        ("want x [T, K] and weights [N, K], not [4, 4] and [6, 5]", (x[:, :4], weights, counts)),
        ("want x [T, K]", (x[None], weights, counts)),
        ("not [4, 5] and [5, 6]", (x, [each.t() for each in weights], counts)),
        ("want weights [6, 5] for all experts, not [6, 4], [6, 5]", (x, [weights[0], weights[1][:, :4]], counts)),
        ("weights are torch.float32 and x torch.bfloat16", (x, [weights[0].float(), weights[1]], counts)),
        ("want x [T, K] and weights [N, K], not [4, 5] and []", (x, [], [])),
        ("counts [3] for 2 experts", (x, weights, [2, 1, 1])),
        ("do not make up 4 rows", (x, weights, [3, 2])),
        ("[5, -1] do not make up", (x, weights, [5, -1])),
        ("counts are torch.int32 on cpu: want int64", (x, weights, torch.tensor([3, 1], dtype=torch.int32))),
        ("int64 on meta: want int64 on cpu", (x, weights, torch.tensor([3, 1], device="meta"))),
        ("counts [2, 1] for 2 experts", (x, weights, torch.tensor([[3], [1]]))),
        ("1 biases for 2 experts", (x, weights, counts, biases[:1])),
        ("want biases [6] for all experts, not [5], [6]", (x, weights, counts, [biases[0], biases[1][:5]])),
        ("biases are torch.float32", (x, weights, counts, [each.float() for each in biases])),
    ]
    for words, arguments in wrong:
        with pytest.raises(ValueError) as raised:
            grouped_matmul(*arguments)  # type: ignore[arg-type]
        assert words in str(raised.value)
    with pytest.raises(ValueError, match=r"weights \[K, N\], not \[4, 5\] and \[6, 5\]"):
        grouped_matmul(x, weights, counts, transposed=False)
    for dy in (problem.dy[:3], problem.dy.float(), problem.dy[0]):
        with pytest.raises(ValueError, match=r"want dy \[T, N\] and x \[T, K\]"):
            weight_gradients(dy, x, counts)
    with pytest.raises(ValueError, match="of which there must be some"):
        weight_gradients(problem.dy[:0], x[:0], [])
    with pytest.raises(ValueError, match="of which there must be some"):
        accumulate_weight_gradients([], problem.dy[:0], x[:0], [])
    main_grads = [torch.zeros(6, 5) for _ in counts]
    for gradients in (main_grads[:1], [main_grads[0].t(), main_grads[1]]):
        with pytest.raises(ValueError, match="want 2 main gradients"):
            accumulate_weight_gradients(gradients, problem.dy, x, counts)
    for gradients in ([main_grads[0], main_grads[1].bfloat16()], [each.double() for each in main_grads]):
        with pytest.raises(ValueError, match="want all in that or float32"):
            accumulate_weight_gradients(gradients, problem.dy, x, counts)


@pytest.mark.parametrize("mode", ["fake", "compiled"])
def test_tensors_without_memory_take_the_plain_way(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if mode == "fake":
        with FakeTensorMode():
            x, weight = torch.zeros(7, 5, dtype=torch.bfloat16), torch.zeros(6, 5, dtype=torch.bfloat16)
            weights = [weight.clone().requires_grad_() for _ in range(3)]
            y = grouped_matmul(x, weights, [3, 0, 4])
            y.backward(torch.zeros_like(y))
            assert y.shape == (7, 6) and weights[1].grad is not None
            accumulate_weight_gradients([torch.zeros(6, 5)] * 3, y.detach(), x, [3, 0, 4])
        return
    problem = Problem([3, 0, 4], 6, 5, torch.bfloat16, biased=True)
    compiled = torch.compile(lambda x, w, c, b: grouped_matmul(x, w, c, b), backend="eager")
    for got, plain, exact in zip(problem.run(compiled), problem.run(loop), problem.exact(), strict=True):
        assert error(got, exact) <= error(plain, exact) + torch.finfo(torch.bfloat16).eps / 2


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield
