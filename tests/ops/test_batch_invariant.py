"""A row's forward bits alone, first, last and in other batches, for every operator that declares them independent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mindspeed_lite.ops import batch_invariant, discovery, dispatch, native
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.ops.case import Draw
from mindspeed_lite.ops.dispatch import OPERATORS, REFERENCE, Operator, force, operator
from mindspeed_lite.ops.grouped_matmul import grouped_matmul

SIZES = (1, 2, 7, 64, 257)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Their inputs' dimension of rows (None: shared by all rows), and their output's.
FIRST = ((0, None, None, None), 0)
LABELLED = ((0, None, 0), 0)
ROWS: dict[str, Callable[[Any], tuple[Sequence[int | None], int]]] = {
    "activation": lambda shape: ((0, *[None] * shape.bias, *[0] * shape.weights), 0),
    "attention": lambda shape: ((1, 1, 1, 0 if shape.mask else None), 1),
    "bias_dropout_add": lambda shape: ((0, 0, None), 0),
    "cross_entropy": lambda shape: ((0, 0), 0),
    "layer_norm": lambda shape: FIRST,
    "linear_cross_entropy": lambda shape: LABELLED,
    "linear_log_prob": lambda shape: (LABELLED[0], 1),
    "masked_softmax": lambda shape: ((0, None if shape.causal else 0), 0),
    "moe_router": lambda shape: FIRST,
    "permute": lambda shape: ((0, 0, 0), 0),
    "rms_norm": lambda shape: FIRST,
    "rope": lambda shape: ((1, None), 1),
    "vocab_embedding": lambda shape: ((None, 0), 0),
}
# No rows, or in a backward pass only; grouped_matmul has a test of its own.
OTHERS = {"accumulate_wgrad", "adamw", "grouped_matmul"}
# Widths without whole vectors, and sums that torch splits over threads.
SHAPES = {
    "activation": ("8x154", "8x77,kind=gelu", "8x77,kind=gelu,bias=1", "8x77,kind=squared_relu", "8x154,kind=geglu",
                   "8x50,kind=quick_geglu,weights=1"),
    "attention": ("s=33,n=2,d=16", "s=33,b=2,n=2,d=16,mask=1", "s=17,b=2,n=2,d=16,sink=1", "s=33,n=4,g=2,d=24,w=8",
                  "s=33,n=2,d=16,causal=0"),
    "bias_dropout_add": ("8x77",),
    "cross_entropy": ("24x48", "4x40001"),
    "layer_norm": ("8x77", "4x5001"),
    "linear_cross_entropy": ("24x16x48", "4x77x9001"),
    "linear_log_prob": ("4x77x1501,entropy=1", "24x16x48,temperature=0.7,cap=5"),
    "masked_softmax": ("1x2x33x33", "2x2x3x1025,causal=0"),
    "moe_router": ("24x48x4", "37x60x4,scores=sigmoid", "24x48x4,pre=1,groups=4,group_topk=2",
                   "24x48x1,scores=sqrtsoftplus"),
    "permute": ("37x77x12x1", "64x40x8x2", "30x64x64x6"),
    "rms_norm": ("8x77", "4x5001"),
    "rope": ("s=33,n=2,d=18", "s=17,b=2,n=2,d=16,r=8,pairs=interleaved"),
    "vocab_embedding": ("24x17x32",),
}  # fmt: skip


@pytest.fixture(autouse=True)
def required() -> Iterator[None]:
    undo = dispatch.require_batch_invariance()
    yield
    undo()


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two for sums that torch splits."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "40001" in request.node.name else 1)
    yield
    torch.set_num_threads(before)


Run = Callable[..., Tensor]


def dependent_rows(run: Run, inputs: Sequence[Tensor], dims: Sequence[int | None], out: int) -> list[tuple[int, int]]:
    """(batch size, place) where the first row has other bits than alone."""

    def batch(order: Tensor) -> Tensor:
        given = [t if dim is None else t.index_select(dim, order) for t, dim in zip(inputs, dims, strict=False)]
        with torch.no_grad():
            return run(*given)

    count = next(t.shape[dim] for t, dim in zip(inputs, dims, strict=False) if dim is not None)
    alone = batch(torch.zeros(1, dtype=torch.int64)).select(out, 0)
    found, generator = [], torch.Generator().manual_seed(3)
    for size in SIZES if inputs[0].shape[-1] < 40001 else SIZES[:3]:
        order = torch.randint(count, (size,), generator=generator)
        places = (0, size // 2, size - 1)
        order[[*places]] = 0
        got = batch(order)
        found += [(size, place) for place in places if not torch.equal(got.select(out, place), alone)]
    return found


def run_of(name: str, shape: Any) -> Run:
    if name == "permute":
        return lambda x, *rest: replace(shape, tokens=len(x)).ours(x, *rest)
    run: Run = shape.ours
    return run


EVERY_SHAPE = pytest.mark.parametrize(("name", "text"), [(name, text) for name in SHAPES for text in SHAPES[name]])


@DTYPES
@EVERY_SHAPE
def test_a_row_has_the_bits_that_it_has_alone(name: str, text: str, dtype: torch.dtype) -> None:
    shape = discovery.cases(name).parse(text)
    dims, out = ROWS[name](shape)
    assert not dependent_rows(run_of(name, shape), shape.make(Draw("cpu", dtype)), dims, out)


@EVERY_SHAPE
def test_so_has_the_reference(name: str, text: str) -> None:
    shape = discovery.cases(name).parse(text)
    dims, out = ROWS[name](shape)
    with force(name, REFERENCE):
        assert not dependent_rows(run_of(name, shape), shape.make(Draw("cpu", torch.float32)), dims, out)


@pytest.mark.parametrize("text", SHAPES["attention"][:4])
def test_so_has_attention_a_block_of_rows_at_a_time(text: str) -> None:
    shape = discovery.cases("attention").parse(text)
    dims, out = ROWS["attention"](shape)
    assert not dependent_rows(shape.ours, shape.make(Draw("cpu", torch.float16)), dims, out)


@DTYPES
@pytest.mark.parametrize("backend", ["cpu", REFERENCE])
def test_an_experts_token_has_the_bits_that_it_has_alone(backend: str, dtype: torch.dtype) -> None:
    draw = Draw("cpu", dtype)
    x, weights = draw(20, 77, gradient=False), [draw(50, 77, gradient=False) for _ in range(3)]

    def third_expert(tokens: Tensor) -> Tensor:
        return grouped_matmul(torch.cat((x[:5], x[:2], tokens)), weights, [5, 2, len(tokens)])[7:]

    with force("grouped_matmul", backend):
        assert not dependent_rows(third_expert, (x,), (0,), 0)


@DTYPES
def test_a_packed_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    draw = Draw("cpu", dtype)
    one, other = ([draw(length, 2, 16, gradient=False) for _ in range(3)] for length in (33, 70))

    def attend(*sequences: list[Tensor]) -> tuple[Tensor, ...]:
        lengths = [len(each[0]) for each in sequences]
        ends = [0, *itertools.accumulate(lengths)]
        out: Tensor = packed.attention(
            *map(torch.cat, zip(*sequences, strict=True)), packed.Packing.of(ends), causal=True
        )
        return out.split(lengths)

    alone = attend(one)[0]
    for pack, place in (((one, one), 1), ((other, one), 1), ((one, other, one), 2), ((other, one, other), 1)):
        assert torch.equal(attend(*pack)[place], alone)


# Matmuls and other functions of PyTorch


@DTYPES
@pytest.mark.parametrize(
    ("function", "width"),
    [
        (torch.sigmoid, 77),
        (torch.nn.functional.silu, 77),
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 77),
        (torch.nn.functional.softplus, 77),
        (lambda x: x.sum(-1), 40001),
        (lambda x: torch.mean(x.float(), dim=1), 40001),
        (lambda x: x @ _matrix(x, 77, 50), 77),
        (lambda x: torch.nn.functional.linear(x, _matrix(x, 200, 64)), 64),
        (lambda x: torch.bmm(x.view(-1, 7, 11), _matrix(x, 11, 9).expand(len(x), 11, 9)), 77),
        (lambda x: torch.baddbmm(x.view(-1, 7, 11)[..., :7], x.view(-1, 7, 11), x.view(-1, 11, 7), alpha=0.3), 77),
    ],
)
def test_functions_of_torch(function: Run, width: int, dtype: torch.dtype) -> None:
    x = Draw("cpu", dtype)(20, width, gradient=False)
    with batch_invariant.scope():
        assert not dependent_rows(function, (x,), (0,), 0)
    if dtype == torch.float32 and width == 77:
        assert function is torch.sigmoid or torch.allclose(
            function(x), _within_scope(function, x), rtol=1e-4, atol=1e-5
        )


def _matrix(x: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(x.dtype)


def _within_scope(function: Run, *given: Tensor) -> Tensor:
    with batch_invariant.scope():
        return function(*given)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.matmul, [(5, 3, 4), (4, 6)]),
        (torch.matmul, [(2, 1, 3, 4), (5, 4, 2)]),
        (torch.matmul, [(4,), (4, 3)]),
        (torch.matmul, [(3, 4), (4,)]),
        (torch.addmm, [(6,), (5, 4), (4, 6)]),
        (lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2.0), [(2, 1, 3), (2, 70, 4), (2, 4, 3)]),
        (torch.nn.functional.linear, [(0, 4), (3, 4)]),
        (torch.nn.functional.silu, [(5, 3)]),
        (torch.nn.functional.softplus, [(5, 3)]),
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), [(5, 3)]),
    ],
)
def test_values_and_gradients_are_those_of_torch(function: Run, shapes: list[tuple[int, ...]]) -> None:
    found = []
    for run in (function, lambda *given: _within_scope(function, *given)):
        generator = torch.Generator().manual_seed(5)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
        y = run(*inputs)
        y.backward(torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape))
        found.append((y.detach(), *(each.grad for each in inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_function_without_an_independent_form_is_refused() -> None:
    with batch_invariant.scope(), pytest.raises(RuntimeError, match=r"--batch-invariant: torch\.einsum has no form"):
        torch.einsum("ab,cb->ac", torch.ones(2, 3), torch.ones(4, 3))


# The harness sees a dependence, and the dispatcher refuses it


def test_a_backend_that_splits_by_the_batch_is_seen() -> None:
    def by_count(x: Tensor) -> Tensor:
        parts = [each.sum(-1) for each in x.chunk(4 if len(x) > 7 else 1, -1)]
        return torch.stack(parts).sum(0)

    seen = dependent_rows(by_count, (torch.randn(20, 5001),), (0,), 0)
    assert seen == [(size, place) for size in (64, 257) for place in (0, size // 2, size - 1)]


def test_torchs_own_matmul_is_seen() -> None:
    x, w = torch.randn(20, 96), torch.randn(96, 100)
    assert dependent_rows(lambda x: x @ w, (x,), (0,), 0)


def test_every_backend_declares_itself() -> None:
    assert set(ROWS) == set(SHAPES) == set(OPERATORS) - OTHERS
    for name in OPERATORS:
        found = operator(name)
        named = set() if name in OTHERS - {"grouped_matmul"} else {REFERENCE, *found.backends}
        assert found.batch_dependence is not None and set(found.batch_dependence) == named, name


def test_gradients_of_weights_are_pytorchs_own() -> None:
    found = operator("accumulate_wgrad")
    assert found.choose(Case("cpu")) is found.reference


def test_only_what_is_independent_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_reported", set())
    heard: list[tuple[str, str, tuple[str, ...]]] = []
    stop = dispatch.on_fallback(lambda *what: heard.append(what))
    declared = {REFERENCE: "it adds rows", "cpu": "it splits by the number of rows"}
    found = Operator("double", double, {"cpu": native.__name__, "cuda": native.__name__}, batch_dependence=declared)
    assert found.choose(Case("cpu"))(torch.ones(1)) == 2
    stop()
    assert heard == [("double", "cpu", ("--batch-invariant: it splits by the number of rows",))]
    with pytest.raises(RuntimeError, match="double has no batch-invariant backend on cuda: --batch-invariant: it adds"):
        found.choose(Case("cuda"))
    assert found.why_not(Case("cuda")) == [
        "--batch-invariant: it does not declare whether a row's bits depend on its batch"
    ]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype = torch.float32


def double(x: Tensor) -> Tensor:
    return x + x
