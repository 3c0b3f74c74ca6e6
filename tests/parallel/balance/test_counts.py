"""Counts on one rank; several ranks are counted in `tests/training/test_moe_record_load.py`."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.parallel.balance.counts import ExpertPlace, LoadAverage, LoadCounter, predicted_loads
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks


def test_steps_are_apart_and_layers_without_experts_left_out():
    counter = LoadCounter(layers=3, experts=4, interval=2, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(each, 4, generator=generator) < 0.4 for each in (5, 3, 7)]
    counter.add(1, maps[0])
    counter.add(1, maps[1])
    counter.end_step(11)
    counter.add(1, maps[2])
    assert counter.steps == 1 and not counter.is_full
    counter.end_step(12)
    assert counter.is_full
    # The second of two replicas, each over two ranks.
    rows, steps = counter.take(ExpertPlace(replica=1, replicas=2, expert_parallel=2))
    assert rows == [1] and [each.step for each in steps] == [11, 12] and counter.steps == 0
    for found, tokens, expected in zip(steps, (8, 7), (torch.cat(maps[:2]), maps[2]), strict=True):
        counts = expected.sum(0).tolist()
        assert found.tokens == [tokens] and found.experts == [counts]
        assert found.ranks == [[0, 0, sum(counts[:2]), sum(counts[2:])]]
    counter.add(0, maps[0])
    counter.end_step(13)
    rows, (only,) = counter.take(ExpertPlace(0, 1, 1))
    assert rows == [0] and only.experts == [maps[0].sum(0).tolist()]


def test_ranks_are_counted_by_the_places_of_experts():
    counter = LoadCounter(layers=2, experts=4, interval=2, device=torch.device("cpu"))
    each = torch.tensor([[True, True, True, False], [True, False, True, False]])
    for step in (1, 2):
        counter.add(0, each)
        counter.add(1, each)
        # In the first step rank 0 has experts 2 and 3 of the second layer.
        counter.end_step(step, {1: [2, 3, 0, 1]} if step == 1 else None)
    _, steps = counter.take(ExpertPlace(0, 1, 2))
    assert [each.experts for each in steps] == [[[2, 1, 2, 0]] * 2] * 2
    assert [each.ranks for each in steps] == [[[3, 2], [2, 3]], [[3, 2], [3, 2]]]
    counter.add(0, each[:, :2].repeat(1, 2))
    counter.end_step(3, {0: [0, 2, 1, 3]})
    _, (only,) = counter.take(ExpertPlace(0, 1, 2))
    assert only.experts == [[2, 1, 2, 1]] and only.ranks == [[4, 2]]


@forked()
def test_averages_of_all_ranks_predict_the_same_loads(tmp_path):
    def body(rank):
        joined(rank, 3, tmp_path)
        group = torch.distributed.group.WORLD
        average = LoadAverage(3, torch.device("cpu"))
        average.add(torch.tensor([[True, False, rank == 0]]))
        average.end_step()
        assert predicted_loads([average], group) == [[3.0, 0.0, 1.0]]
        average.end_step()
        # The two steps weigh 0.09 and 0.1.
        assert predicted_loads([average], group)[0][0] == pytest.approx(3 * 0.09 / 0.19, abs=3 / 1024)

    on_ranks(3, body)
