"""permute, unpermute, sort_chunks: the definition by hand, and every other path against it in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.permute import chunks, cpu, permute, reference, rows, sort_chunks, unpermute
from tests.harness.compare import Sizes, one_thread
from tests.harness.errors import error
from tests.harness.reasons import why_not_of

from . import twin

why_not = why_not_of(permute)

cuda = pytest.importorskip("mindspeed_lite.ops.permute.cuda", reason="Triton is not installed")
MODULES: dict[str, ModuleType] = {"reference": reference, "cpu": cpu, "triton": cuda}
backends = pytest.mark.parametrize("backend", MODULES)


class Problem(NamedTuple):
    tokens: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    count: int
    capacity: int | None
    gradient: torch.Tensor
    """Of unpermute's result."""


def problem(
    tokens: int, experts: int, hidden: int, topk: int | None, rows: float, drop: bool, dtype: torch.dtype,
    probs_dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Problem:  # fmt: skip
    """topk: None for a number of experts that differs; rows: in relation to the routed pairs."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if topk is None:
        routing_map = scores < 0.4
    else:
        chosen = scores.topk(min(topk, experts), 1).indices
        routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    count = min(round(rows * int(routing_map.sum())), tokens * experts)
    capacity = min(count // experts, tokens) if drop else None
    x, gradient = (torch.randn(tokens, hidden, generator=generator).to(dtype) for _ in range(2))
    probs = torch.rand(tokens, experts, generator=generator).to(probs_dtype)
    return Problem(x, routing_map, probs, count if capacity is None else capacity * experts, capacity, gradient)


def run(module: Any, given: Problem, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """What NAMES says, by a backend's own functions."""
    x, probs, gradient = (t.to(dtype or t.dtype) for t in (given.tokens, given.probs, given.gradient))
    leaves = [t.clone().requires_grad_() for t in (x, probs)]
    permuted, permuted_probs, row_ids = module.permute(
        leaves[0], given.routing_map, leaves[1], given.count, given.capacity
    )
    torch.autograd.backward((permuted, permuted_probs), (permuted.detach().cos(), permuted_probs.detach().sin()))
    inner = [permuted.detach().sin().requires_grad_(), probs.clone().requires_grad_()]
    out = module.unpermute(inner[0], row_ids, x.shape[0], inner[1], given.routing_map, given.capacity is not None)
    out.backward(gradient)
    return [permuted.detach(), permuted_probs.detach(), *(t.grad for t in leaves), out.detach(),
            *(t.grad for t in inner)]  # type: ignore[misc]  # fmt: skip


def expected_pairs(given: Problem) -> list[tuple[int, int]]:
    """(token, expert) of every row, in plain Python."""
    tokens, experts = given.routing_map.shape
    routed = [(t, e) for e in range(experts) for t in range(tokens) if given.routing_map[t, e]]
    others = [(t, e) for e in range(experts) for t in range(tokens) if not given.routing_map[t, e]]
    if given.capacity is None:
        return (routed + others)[: given.count]
    of = [[pair for pair in routed + others if pair[1] == e][: given.capacity] for e in range(experts)]
    return [pair for each in of for pair in each]


# ---- what it is ----


def test_by_hand() -> None:
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    routing_map = torch.tensor([[0, 1], [1, 1], [1, 0]]).bool()
    probs = torch.tensor([[0.0, 1.0], [0.25, 0.75], [1.0, 0.0]])
    permuted, permuted_probs, row_ids = permute(tokens, routing_map, probs, 4)
    assert permuted.tolist() == [[3, 4], [5, 6], [1, 2], [3, 4]]
    assert permuted_probs is not None and permuted_probs.tolist() == [0.25, 1, 1, 0.75]
    assert unpermute(permuted, row_ids, (3, 2)).tolist() == [[1, 2], [6, 8], [5, 6]]
    assert torch.equal(unpermute(permuted, row_ids, (3, 2), probs, routing_map), tokens)
    assert torch.equal(permute(tokens, routing_map)[0], permuted)
    assert permute(tokens, routing_map, num_out_tokens=torch.tensor(4))[1] is None
    # A capacity of one row, and of three: the first unrouted token of each expert fills up.
    assert permute(tokens, routing_map, probs, 2, True)[0].tolist() == [[3, 4], [1, 2]]
    padded = permute(tokens, routing_map, probs, 6, True)
    assert padded[0].tolist() == [[3, 4], [5, 6], [1, 2], [1, 2], [3, 4], [5, 6]]
    assert padded[1] is not None and padded[1].tolist() == [0.25, 1, 0, 1, 0.75, 0]
    # Fewer rows than pairs, and more.
    assert permute(tokens, routing_map, probs, 3)[0].tolist() == [[3, 4], [5, 6], [1, 2]]
    assert permute(tokens, routing_map, probs, 5)[0].tolist() == [[3, 4], [5, 6], [1, 2], [3, 4], [1, 2]]


MANY = {
    "tokens": st.integers(1, 40),
    "experts": st.sampled_from([1, 2, 5, 8, 13, 33]),
    "hidden": st.sampled_from([1, 3, 16, 40]),
    "topk": st.sampled_from([None, 1, 2, 4, 7]),
    "rows": st.sampled_from([1.0, 1.0, 0.6, 1.7]),
    "drop": st.booleans(),
    "seed": st.integers(0, 100),
}


@settings(max_examples=60)
@given(**MANY)
def test_rows_are_those_of_plain_python_on_every_backend(**drawn: Any) -> None:
    check_rows(("reference", "cpu"), **drawn)


# The interpreter takes its time, for each token and expert.
FEW = MANY | {"tokens": st.integers(1, 12), "experts": st.sampled_from([1, 5, 9]), "hidden": st.sampled_from([1, 5])}


@settings(max_examples=6)
@given(**FEW)
def test_rows_of_the_triton_kernels_are_those_of_plain_python(**drawn: Any) -> None:
    check_rows(("triton",), **drawn)


def check_rows(which: tuple[str, ...], **drawn: Any) -> None:
    given = problem(**drawn, dtype=torch.float32)
    if not given.count:
        return
    pairs = expected_pairs(given)
    experts = given.routing_map.shape[1]
    with one_thread():
        for name in which:
            made = MODULES[name].permute(given.tokens, given.routing_map, given.probs, given.count, given.capacity)
            assert torch.equal(made[0], given.tokens[[t for t, _ in pairs]])
            assert made[1].tolist() == [given.probs[pair].item() for pair in pairs]
            assert made[2].dtype == torch.int32 and made[2].numel() == 2 * given.count + len(given.tokens) + 1
            pair, order, offsets = (part.tolist() for part in rows.split(made[2], given.count))
            assert pair == [t * experts + e for t, e in pairs]
            assert order == sorted(range(given.count), key=lambda row: pair[row])
            assert offsets == [sum(t < token for t, _ in pairs) for token in range(len(given.tokens) + 1)]


# ---- strides, sizes, gradients ----


@backends
def test_a_token_without_rows_gets_zeros(backend: str) -> None:
    routing_map = torch.tensor([[0, 0], [1, 1], [0, 0]]).bool()
    x = torch.ones(3, 4, requires_grad=True)
    permuted, _, row_ids = MODULES[backend].permute(x, routing_map, None, 2, None)
    out = MODULES[backend].unpermute(permuted, row_ids, 3, None, None, False)
    out.sum().backward()
    assert out[:, 0].tolist() == [0, 2, 0] and x.grad is not None and x.grad[:, 0].tolist() == [0, 2, 0]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_asks_the_device_for_a_number(backend: str, drop: bool) -> None:
    given = problem(8, 4, 4, 2, 1.0, drop, torch.float32)
    x, probs = given.tokens.clone().requires_grad_(), given.probs.clone().requires_grad_()
    kernels = importlib.import_module("mindspeed_lite.ops.permute.kernels")
    if backend == "triton" and not hasattr(kernels.count_kernel, "interpreter_builder") and torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
    with Sizes() as sizes:
        permuted, weights, row_ids = MODULES[backend].permute(x, given.routing_map, probs, given.count, given.capacity)
        out = MODULES[backend].unpermute(permuted, row_ids, 8, probs, given.routing_map, drop)
        (out.sum() + weights.sum()).backward()
    asked = ("_local_scalar", "nonzero", "masked_select", "aten.item")
    assert not [name for name in sizes.names if any(word in name for word in asked)], sizes.names


# ---- which backend, errors ----


@pytest.mark.parametrize("capacity", [None, 2])
def test_row_ids_take_five_launches_on_cuda(capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[str] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: issued.append("kernel")

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and "empty" not in func._schema.name:
                issued.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = ("count_kernel", "pair_kernel", "order_kernel")
    monkeypatch.setattr(cuda, "kernels", SimpleNamespace(**dict.fromkeys(names, Kernel())))
    routing_map = torch.ones(6, 4, dtype=torch.bool)
    with Launches():
        cuda.row_ids(routing_map, 8, capacity)
    assert issued == ["kernel", "aten::cumsum", "kernel", "aten::cumsum", "kernel"]


def test_row_ids_of_one_backend_serve_another() -> None:
    given = problem(6, 3, 4, 2, 1.0, False, torch.float32)
    permuted, _, row_ids = permute(given.tokens, given.routing_map, None, given.count)
    with force("permute", "reference"):
        other = permute(given.tokens, given.routing_map, None, given.count)[2]
        want = unpermute(permuted, row_ids, (6, 4))
    assert torch.equal(row_ids, other) and torch.equal(unpermute(permuted, other, (6, 4)), want)


def test_maps_of_other_dtypes_are_read_as_bool() -> None:
    given = problem(6, 3, 4, 2, 1.0, False, torch.float32)
    for dtype in (torch.int8, torch.int64, torch.float32):
        assert torch.equal(permute(given.tokens, given.routing_map.to(dtype), None, 12)[0],
                           permute(given.tokens, given.routing_map, None, 12)[0])  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, m, p: permute(x[0], m), r"want tokens \[T, H\]"),
        (lambda x, m, p: permute(x, m[:2]), "routing_map"),
        (lambda x, m, p: permute(x, m, p[:, :1]), "probs of routing_map's shape"),
        (lambda x, m, p: permute(x, m, p, -1), "num_out_tokens is -1"),
        (lambda x, m, p: permute(x, m, p, drop_and_pad=True), "wants num_out_tokens"),
        (lambda x, m, p: permute(x, m, p, 7 * 3, True), "a capacity of 7 for 4 tokens"),
        (lambda x, m, p: permute(x, m, p, 7, topk=2), "do not make 7 rows"),
        (lambda x, m, p: permute(x[:1].expand(2**30, 5), m[:1].expand(2**30, 3)), "more pairs than"),
        (lambda x, m, p: unpermute(x, torch.zeros(13), (4, 6)), "restore_shape"),
        (lambda x, m, p: unpermute(x, torch.zeros(12), (4, 5)), r"row_ids \(12,\) are not those of 4 rows"),
        (lambda x, m, p: unpermute(x, torch.zeros(4), (4, 5)), "another backend"),
        (lambda x, m, p: unpermute(x, torch.zeros(13), (4, 5), p), "no map"),
        (lambda x, m, p: unpermute(x, torch.zeros(13), (4, 5), p, m[:2]), "routing_map of this shape"),
        (lambda x, m, p: unpermute(x, torch.zeros(12), (3, 5), p, m), "are not those of 3 tokens"),
        (lambda x, m, p: sort_chunks(x, [2, 1], [1, 0]), "do not make 4"),
        (lambda x, m, p: sort_chunks(x, [5, -1], [1, 0]), "do not make 4"),
        (lambda x, m, p: sort_chunks(x, [2, 2], [1, 1]), "is no order of 2"),
        (lambda x, m, p: sort_chunks(x, [2, 2], [0]), "is no order of 2"),
        (lambda x, m, p: sort_chunks(x, [2, 2], [1, 0], p[:3]), r"probs \[P"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(call: Callable[..., Any], words: str) -> None:
    x, routing_map = torch.zeros(4, 5), torch.ones(4, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=words):
        call(x, routing_map, torch.zeros(4, 3))


# ---- chunks ----


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=9),
    width=st.sampled_from([None, 0, 1, 3]),
    seed=st.integers(0, 50),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_chunks_are_those_of_split_and_cat(sizes: list[int], width: int | None, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sizes), generator=generator)
    shape = (sum(sizes),) if width is None else (sum(sizes), width)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    probs, dprobs = (torch.rand(sum(sizes), generator=generator) for _ in range(2))
    pieces = [torch.split(t, sizes) for t in (x, probs)]
    want = [torch.cat([each[i] for i in order]) if sizes else t for each, t in zip(pieces, (x, probs), strict=True)]
    as_tensor = torch.tensor(sizes, dtype=torch.int64)
    for cut in ((sizes, order), (as_tensor, order), (as_tensor, order.tolist())):
        leaves = [t.clone().requires_grad_() for t in (x, probs)]
        got = sort_chunks(leaves[0], *cut, leaves[1])
        assert got[1] is not None and torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        torch.autograd.backward(got, (dy, dprobs))  # type: ignore[arg-type]
        back = [_moved_back(t, sizes, order.tolist()) for t in (dy, dprobs)]
        assert all(leaf.grad is not None and torch.equal(leaf.grad, b) for leaf, b in zip(leaves, back, strict=True))
    if sizes:
        assert torch.equal(chunks._look_up(as_tensor, order, x), want[0])
        assert torch.equal(chunks._look_up(as_tensor[order], order.argsort(), want[0]), x)


def _moved_back(t: torch.Tensor, sizes: list[int], order: list[int]) -> torch.Tensor:
    pieces = torch.split(t, [sizes[each] for each in order])
    return torch.cat([pieces[order.index(each)] for each in range(len(order))]) if order else t


def test_sizes_on_a_device_stay_there() -> None:
    sizes, order = torch.tensor([2, 3, 1], device="meta"), torch.tensor([1, 2, 0])
    x = torch.zeros(6, 4, device="meta", requires_grad=True)
    with Sizes() as sizes_seen:
        out, probs = sort_chunks(x, sizes, order, torch.zeros(6, device="meta"))
        out.sum().backward()
    assert out.shape == (6, 4) and probs is not None and probs.shape == (6,)
    assert not [name for name in sizes_seen.names if "_local_scalar" in name]
    with pytest.raises(ValueError, match="3 sizes and an order of 2"):
        sort_chunks(x, sizes, order[:2])


def test_chunks_in_their_order_are_not_copied() -> None:
    x = torch.randn(6, 2)
    assert sort_chunks(x, [2, 4], [0, 1])[0] is x


def test_gradients_of_chunks() -> None:
    leaves = [torch.randn(6, 2, dtype=torch.float64, requires_grad=True), torch.rand(6, dtype=torch.float64)]
    leaves[1].requires_grad_()
    assert gradcheck(lambda x, p: sort_chunks(x, [2, 1, 3], [2, 0, 1], p), leaves)


# ---- the NPU path on an emulation of torch_npu ----


def test_the_npu_path_has_a_reason_for_what_torch_npu_does_not_take(npu_twin: list[twin.Call]) -> None:
    given = problem(6, 3, 4, 2, 1.0, False, torch.float32)
    x, routing_map, probs = given.tokens, given.routing_map, given.probs
    with force("permute", "npu"):
        (reason,) = why_not(x[:1], torch.ones(1, 600), None, 600, topk=600)
        assert "512" in reason and why_not(x, routing_map, probs, 12, True) == []
        with pytest.raises(RuntimeError, match="cannot serve"):
            permute(x, routing_map, probs, 12)
        # Row ids of the reference go back to it, and those of torch_npu nowhere else.
        with force("permute", "reference"):
            row_ids = permute(x, routing_map, probs, 12)[2]
        with pytest.raises(RuntimeError, match="cannot serve"):
            unpermute(torch.zeros(12, 4), row_ids, (6, 4))
        row_ids = permute(x, routing_map, probs, 12, topk=2)[2]
    with force("permute", "reference"), pytest.raises(ValueError, match="another backend"):
        unpermute(torch.zeros(12, 4), row_ids, (6, 4))


# ---- Triton ----


def test_triton_rows_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    monkeypatch.setattr(cuda, "_PAIRS", 8)
    given = problem(7, 3, 50, 2, 1.0, False, torch.float32)
    exact = run(reference, given, torch.float64)
    assert all(error(ours, truth) < 1e-6 for ours, truth in zip(run(cuda, given), exact, strict=True))
