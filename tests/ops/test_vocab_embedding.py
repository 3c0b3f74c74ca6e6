"""vocab_embedding: the rows of a slice, zeros elsewhere, to the bit what masks and assignments give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops.vocab_embedding import reference, vocab_embedding
from tests.harness.compare import Sizes, one_thread
from tests.harness.reasons import why_not_of

why_not = why_not_of(vocab_embedding)

BOTH = pytest.mark.parametrize("function", [vocab_embedding, reference.vocab_embedding], ids=["cpu", "reference"])


CALLS: dict[str, Any] = {
    "shape": st.lists(st.integers(0, 6), max_size=3),
    "rows": st.integers(1, 9),
    "rank": st.integers(0, 3),
    "kind": st.sampled_from([torch.int64, torch.int32]),
    "seed": st.integers(0, 1000),
}
HALVES_AND_FP32 = [torch.bfloat16, torch.float16, torch.float32]


def call(
    shape: list[int], rows: int, dtype: torch.dtype, kind: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, ids and the output's gradient; the weight is one of four slices."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 5, generator=generator).to(dtype)
    ids = torch.randint(0, 4 * rows, shape, generator=generator).to(kind)
    return weight, ids, torch.randn(*shape, 5, generator=generator).to(dtype)


def assigned(ids: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """The same with assignments to masked positions."""
    mask = (ids < start) | (ids >= start + weight.shape[0])
    local = ids.clone() - start
    local[mask] = 0
    out = torch.nn.functional.embedding(local, weight)
    out[mask, :] = 0.0
    return out


def test_rows_of_the_slice_and_zeros() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    out = vocab_embedding(torch.tensor([[4, 5], [6, 0]]), weight, 4)
    assert out.tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]]]
    out.backward(torch.arange(8.0).view(2, 2, 2))
    assert weight.grad is not None and weight.grad.tolist() == [[0, 1], [2, 3]]


@settings(max_examples=50)
@given(**CALLS, dtype=st.sampled_from([*HALVES_AND_FP32, torch.float64]))
def test_bits_are_those_of_assignments(
    shape: list[int], rows: int, rank: int, dtype: torch.dtype, kind: torch.dtype, seed: int
) -> None:
    weight, ids, dout = call(shape, rows, dtype, kind, seed)
    found = []
    with one_thread():
        for function in (vocab_embedding, reference.vocab_embedding, assigned):
            leaf = weight.clone().requires_grad_()
            out = function(ids, leaf, rank * rows)
            out.backward(dout)
            assert leaf.grad is not None
            found.append((out.detach(), leaf.grad))
    for ours in found[:2]:
        assert all(torch.equal(a, b) for a, b in zip(ours, found[2], strict=True))


@BOTH
def test_rows_that_are_not_finite_stay_where_they_are(function: Any) -> None:
    weight = torch.full((3, 2), torch.inf)
    assert function(torch.tensor([0, 5, 7]), weight, 5).tolist() == [[0, 0], [torch.inf] * 2, [torch.inf] * 2]


@BOTH
def test_transposed_ids_give_contiguous_rows(function: Any) -> None:
    ids = torch.arange(6).view(2, 3)
    out = function(ids.t(), torch.arange(6.0).view(6, 1), 0)
    assert out.is_contiguous() and out[..., 0].tolist() == ids.t().tolist()


def test_nothing_asks_the_device_for_a_number_and_tokens_of_others_spread_over_the_rows() -> None:
    weight = torch.randn(64, 8, requires_grad=True)
    ids = torch.arange(512)
    with Sizes() as sizes:
        out = reference.vocab_embedding(ids, weight, 64)
        rows = out.grad_fn.next_functions[0][0]._saved_indices  # type: ignore[union-attr]
        out.sum().backward()
    assert not [name for name in sizes.names if "nonzero" in name or "index_put" in name or "_local_scalar" in name]
    assert set(rows.bincount().tolist()) == {512 // 64}


def test_on_the_cpu_rows_of_others_are_not_looked_up() -> None:
    weight = torch.randn(64, 8, requires_grad=True)
    with Sizes() as sizes:
        vocab_embedding(torch.arange(512), weight, 64).sum().backward()
    assert not [name for name in sizes.names if "index_put" in name]
    # As a compiler sees it there is no number of hits.
    compiled = torch.compile(vocab_embedding, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.arange(512), weight, 64), vocab_embedding(torch.arange(512), weight, 64))


def test_what_is_not_an_embedding_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="V at least 1"):
        vocab_embedding(torch.tensor([0]), torch.zeros(0, 4))
    with pytest.raises(ValueError, match="count tokens"):
        vocab_embedding(torch.tensor([0.0]), torch.zeros(2, 4))
    assert why_not(torch.tensor([0]), torch.zeros(2, 4)) == []
