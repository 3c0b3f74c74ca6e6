"""Context parallelism where ranks are late, gone, or of another opinion about the sequence's length."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context import UnequalLengthsError
from mindspeed_lite.parallel.context.ring import Ring
from tests.harness import matrix
from tests.harness.compare import error
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks
from tests.parallel.context_parallel import NAMES, Problem, algorithms, definition, rows_of, split

MESSAGES = ("batch_isend_irecv", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


def before_messages(act):
    """Call `act` before every message of this process."""
    for name in MESSAGES:
        original = getattr(dist, name)

        def late(*args, original=original, **kwargs):
            act()
            return original(*args, **kwargs)

        setattr(dist, name, late)


@pytest.mark.parametrize("steps", [13, pytest.param(200, marks=matrix.whole)])
@forked("features")
def test_ranks_that_are_late_by_chance_neither_hang_nor_err(steps):
    ranks, problem, folder = 4, Problem(heads=4, batch=1, chunk=2), Path(tempfile.mkdtemp())
    exact = definition(problem, ranks)

    def body(rank):
        own = algorithms(joined(rank, ranks, folder))
        chance = random.Random(rank)
        before_messages(lambda: time.sleep(chance.random() ** 4 * 4e-3))
        wanted = rows_of(exact, problem, ranks, rank)
        assert len(own) <= 13, "not every algorithm has a step"
        for step, (name, algorithm) in zip(range(steps), itertools.cycle(own.items()), strict=False):
            got = split(problem, ranks, rank, algorithm)
            for part, ours, truth in zip(NAMES, got, wanted, strict=False):
                assert error(ours, truth) < 1e-12, f"step {step}, {name}, {part}"

    on_ranks(ranks, body)


@forked("features")
def test_unequal_lengths_are_one_error_on_every_rank():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, 2, folder)
        rows = 4 + 4 * rank
        q = torch.zeros(rows, 1, 2, 4)
        for algorithm in (context.Algorithm(ring=Ring(group)), context.Algorithm(ulysses=group)):
            with pytest.raises(UnequalLengthsError, match=r"rank 0 4 \(batch 1\), rank 1 8 \(batch 1\)"):
                context.attend(q, q, q, context.zigzag(2 * rows, 2), algorithm)
        hidden = torch.zeros(1, 1, rows, 2 * rows, dtype=torch.bool)
        with pytest.raises(UnequalLengthsError, match="rows of one sequence"):
            context.attend_masked(q, q, q, context.zigzag(2 * rows, 2), group, hidden)

    on_ranks(2, body)
