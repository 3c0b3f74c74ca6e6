"""Attention over gloo ranks in every way, against float64 on one: processes start once for each number of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from mindspeed_lite.ops import attention
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context.blocks import Partial
from mindspeed_lite.parallel.context.collectives import split_heads
from mindspeed_lite.parallel.context.cost import AttentionWork, predict
from mindspeed_lite.parallel.context.layout import stream_rows
from mindspeed_lite.parallel.context.ring import Ring
from tests.harness import matrix
from tests.harness.compare import error
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks
from tests.parallel.context_parallel import FREE, NAMES, Problem, algorithms, definition, rows_of, split

PACK = ((7, 1), (0, 0), (1, 1), (0, 1), (12, 2), (16, 2))
PROBLEMS = {
    "causal": Problem(),
    "grouped keys, latent values": Problem(heads=8, groups=2, size=6, value_size=4),
    "one key head": Problem(heads=8, groups=1, batch=1),
    "every key": Problem(band=FREE),
    "window": Problem(band=(7, 0), chunk=4),
    "window of two sides": Problem(band=(3, 2)),
    "sink": Problem(sink=True),
    "dropout": Problem(dropout=0.3),
    "pack": Problem(lengths=PACK),
    "pack, every key": Problem(lengths=PACK, band=FREE, sink=True),
    "pack, window": Problem(lengths=PACK, band=(2, 0)),
    "pack, dropout": Problem(lengths=PACK, dropout=0.2, groups=2),
    "odd heads": Problem(heads=15, groups=5, batch=1),
    "odd heads of one key": Problem(heads=13, groups=1, batch=1),
}


# What `make test` runs of each number of ranks; two processors compute for all of them.
FEW = ("grouped keys, latent values", "window", "sink", "pack, dropout", "odd heads")
# Of eight ranks: those whose groups four do not have.
OF_EIGHT = ("double ring of 2", "double ring of 4", "hybrid of 2", "hybrid of 4, gathered")


@pytest.mark.parametrize(
    ("ranks", "names", "chosen"),
    [
        (2, tuple(PROBLEMS), ()),
        (3, FEW, ()),
        (4, FEW, ()),
        (8, FEW[:2], OF_EIGHT),
        *(pytest.param(ranks, tuple(PROBLEMS), (), marks=matrix.whole) for ranks in (3, 4, 8)),
    ],
)
@forked("features")
def test_every_algorithm_agrees_with_the_definition(ranks, names, chosen):
    folder = Path(tempfile.mkdtemp())
    problems = {name: PROBLEMS[name] for name in names}
    exact = {name: definition(problem, ranks) for name, problem in problems.items()}

    def body(rank):
        every = algorithms(joined(rank, ranks, folder))
        for algorithm_name in chosen or every:
            algorithm = every[algorithm_name]
            for name, problem in problems.items():
                if algorithm.ulysses is not None:
                    try:
                        split_heads(problem.heads, problem.groups, algorithm.ulysses.size())
                    except ValueError:
                        assert problem.heads < ranks, name
                        continue
                got = split(problem, ranks, rank, algorithm)
                for part, ours, truth in zip(NAMES, got, rows_of(exact[name], problem, ranks, rank), strict=False):
                    assert error(ours, truth) < 1e-12, f"{algorithm_name}, {name}, {part}: {error(ours, truth):.2g}"

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [2, 8])
@forked("features")
def test_bf16_is_as_exact_on_many_ranks_as_on_one(ranks):
    """Partial results are fp32 sums: what is rounded is the result, not each block; a rounded block is noticed."""
    problem = Problem(dtype=torch.bfloat16, chunk=64 // ranks, size=32, value_size=32, groups=2, heads=8, batch=1)
    folder = Path(tempfile.mkdtemp())
    exact = definition(problem, ranks)
    tensors, dout = problem.inputs(ranks)
    leaves = [t.requires_grad_() for t in tensors]
    out = attention.attention(*leaves, causal=True)
    out.backward(dout)
    alone = [out.detach(), *(leaf.grad for leaf in leaves)]

    def body(rank):
        from mindspeed_lite.ops.attention import cpu

        group = joined(rank, ranks, folder)

        def shares(algorithm):
            """The error of all ranks' rows in that of one rank."""
            found = []
            got = split(problem, ranks, rank, context.Algorithm(**algorithm))
            for ours, one, truth in zip(got, alone, exact, strict=True):
                own = torch.tensor(stream_rows(problem.layout(ranks), rank))
                assert ours.dtype == torch.bfloat16
                errors = torch.stack([(its.double() - truth[own]).square().sum() for its in (ours, one[own])])
                torch.distributed.all_reduce(errors)
                found.append((errors[0] / errors[1]).sqrt().item())
            return dict(zip(NAMES, found, strict=False))

        for algorithm in ({"ring": Ring(group)}, {"gathered": group}):
            found = shares(algorithm)
            assert max(found.values()) < 1.05, (algorithm, found)
        del cpu.UNROUNDED
        found = shares({"ring": Ring(group)})
        assert ranks == 2 or min(found.values()) > 1.1, found

    on_ranks(ranks, body)


def test_rows_that_have_seen_no_key_take_no_part_and_nan_stays():
    q, v = torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2)
    partial = Partial.of(q, v)
    logs = torch.tensor([[[float("-inf"), 0.0, float("nan")]]])
    partial.merge(torch.tensor([0.0, 5.0, float("nan")]).reshape(3, 1, 1, 1).expand(3, 1, 1, 2), logs, slice(0, 3))
    partial.merge(torch.full((3, 1, 1, 2), 7.0), torch.full((1, 1, 3), float("-inf")), slice(0, 3))
    assert partial.out[:2, 0, 0, 0].tolist() == [0.0, 5.0] and partial.out[2].isnan().all()
    assert partial.lse[0, 0, :2].tolist() == [float("-inf"), 0.0] and partial.lse[0, 0, 2].isnan()


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "queries", "keys"),
    [
        (8, 8, 4, ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 2), (2, 4), (4, 6), (6, 8))),
        (8, 2, 4, ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (0, 1), (1, 2), (1, 2))),
        (5, 5, 2, ((0, 3), (3, 5)), ((0, 3), (3, 5))),
        (6, 3, 4, ((0, 1), (1, 2), (2, 4), (4, 6)), ((0, 1), (0, 1), (1, 2), (2, 3))),
        (7, 1, 2, ((0, 4), (4, 7)), ((0, 1), (0, 1))),
    ],
)
def test_heads_are_spread_evenly(heads, groups, ranks, queries, keys):
    assert split_heads(heads, groups, ranks) == (queries, keys)


def test_heads_fewer_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 query heads in 1 groups of 2 are fewer than the ranks"):
        split_heads(2, 1, 4)


@forked("features")
def test_what_does_not_fit_is_refused():
    group = joined(0, 1, Path(tempfile.mkdtemp()))
    q = torch.zeros(8, 1, 2, 4)
    one = context.Algorithm(ring=Ring(group))
    with pytest.raises(ValueError, match="a layout of 2 ranks over groups of 1"):
        context.attend(q, q, q, context.zigzag(16, 2), one)
    with pytest.raises(ValueError, match="8 queries, 8 keys and 8 values on a rank that has 4 rows"):
        context.attend(q, q, q, context.zigzag(4, 1), one)


@pytest.mark.parametrize(
    ("ranks", "flops_per_byte", "exposed"),
    [
        # keys and values 8192 B, sums 16384 B; a block is 262144 flops forward and 2.5 times as many backward.
        (2, 1000.0, (8192 - 262) + (8192 - 655) + 16384),
        (2, 1.0, 16384),
        (3, 100.0, 2 * (8192 - 2621) + (8192 - 6553) * 2 + (16384 - 6553) + 16384),
    ],
)
def test_exposed_bytes_of_a_ring_by_hand(ranks, flops_per_byte, exposed):
    work = AttentionWork(64, 1, 4, 4, 8, 8, 2, ranks, True)
    assert predict(work, flops_per_byte)["ring"].exposed == pytest.approx(exposed, rel=1e-3)
