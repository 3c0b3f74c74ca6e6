"""grouped_matmul: its reference against a loop of linear layers, and every other path against it in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed_lite.ops.grouped_matmul import (
    accumulate_weight_gradients,
    cpu,
    grouped_matmul,
    reference,
    weight_gradients,
)
from tests.harness.compare import error
from tests.ops.experts import COUNTS, DTYPES, SLACK, Problem


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.zeros(3, 2), torch.ones(3, 2)]
    biases = [torch.tensor([0.0, 0.0, 1.0]), torch.ones(3), torch.zeros(3)]
    y = reference.grouped_matmul(x, weights, [2, 0, 1], biases, True)
    assert y.tolist() == [[1, 2, 4], [3, 4, 8], [11, 11, 11]]


def test_counts_may_be_a_tensor_of_the_host_or_numbers() -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.bfloat16)
    results = [
        grouped_matmul(problem.x, problem.weights, counts)
        for counts in ([3, 0, 4], (3, 0, 4), torch.tensor([3, 0, 4]), torch.tensor([3, 9, 0, 9, 4])[::2])
    ]
    assert all(torch.equal(results[0], each) for each in results)


def test_weight_gradients_are_those_of_autograd() -> None:
    problem = Problem([3, 0, 4], 6, 5, torch.float64)
    got = weight_gradients(problem.dy, problem.x, problem.counts)
    assert [each.shape for each in got] == [(6, 5)] * 3 and not any(each.requires_grad for each in got)
    torch.testing.assert_close(torch.stack(got), problem.exact()[2])
    assert weight_gradients(problem.dy, problem.x.requires_grad_(), problem.counts)[0].grad_fn is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("counts", [*COUNTS, [40, 1, 0, 300]])
def test_accumulation(dtype: torch.dtype, same: bool, counts: list[int]) -> None:
    problem = Problem(counts, 40, 24, dtype)
    main_dtype = dtype if same else torch.float32
    before = torch.randn(len(counts), 40, 24, generator=torch.Generator().manual_seed(1)).to(main_dtype)
    main_grads = [each.clone() for each in before]
    versions = [each._version for each in main_grads]
    accumulate_weight_gradients(main_grads, problem.dy, problem.x, problem.counts)
    exact = before.double() + problem.exact()[2]
    plain = before + torch.stack(weight_gradients(problem.dy, problem.x, problem.counts))
    assert error(torch.stack(main_grads), exact) <= error(plain, exact) + SLACK
    for main_grad, version, count, old in zip(main_grads, versions, counts, before, strict=True):
        assert torch.equal(main_grad, old) if count == 0 else main_grad._version > version


def test_a_router_does_not_choose_how_many_kernels_onednn_makes() -> None:
    padded = [len(cpu._padded(torch.zeros(rows, 1, dtype=torch.bfloat16))) for rows in range(1, 4097)]
    assert len(set(padded)) <= 96
    assert all(size - rows < 8 or size < 17 / 16 * rows for rows, size in enumerate(padded, 1))


@pytest.mark.parametrize("k", [7, 64])
def test_an_expert_takes_no_notice_of_rows_that_are_others(k: int) -> None:
    """A product of few sizes reads them, and writes what their experts write over."""
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
