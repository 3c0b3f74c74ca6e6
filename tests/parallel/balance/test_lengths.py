"""Orders of micro-batches against exact answers, and the simulation against counts by hand."""

from __future__ import annotations

import itertools
import pickle
import random
import struct

import pytest

from mindspeed_lite.parallel.balance import lengths
from mindspeed_lite.parallel.balance.lengths import rank_costs, read_index, sample_costs, shuffled, simulate_order


def test_a_document_costs_the_pairs_of_its_causal_mask():
    sizes = [5, 1, 0, 12]
    masks = [[(q, k) for q in range(n) for k in range(n) if k <= q] for n in sizes]
    assert lengths.attention_pairs(sizes) == sum(map(len, masks))


def least_largest(costs, units, each):
    """The least that the fullest of ranks with so many units can have, of all ways to divide them."""
    if not units:
        return 0
    first, *rest = units
    return min(
        max(
            costs[first] + sum(costs[other] for other in others),
            least_largest(costs, [unit for unit in rest if unit not in others], each),
        )
        for others in itertools.combinations(rest, each - 1)
    )


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("units", "ranks"), [(4, 2), (8, 2), (12, 3), (8, 4), (6, 1)])
def test_an_order_is_one_and_near_the_exact_one(units, ranks, waits):
    chance = random.Random(units * ranks)
    for _ in range(10):
        costs = [chance.randint(1, 1000) ** 2 for _ in range(units)]
        order = lengths.balanced_order(costs, ranks, waits=waits)
        assert sorted(order) == list(range(units)) and order == lengths.balanced_order(costs, ranks, waits=waits)
        assert sum(rank_costs(costs, order, ranks)) == sum(costs)
        best = least_largest(costs, range(units), units // ranks)
        rows = [order[start : start + ranks] for start in range(0, units, ranks)]
        waited = sum(max(costs[each] for each in row) for row in rows)
        if waits:
            assert waited == sum(sorted(costs, reverse=True)[::ranks])
        else:
            assert max(rank_costs(costs, order, ranks)) <= 4 / 3 * best
            # Each rank's own come in falling order.
            assert all(costs[a] >= costs[b] for pair in itertools.pairwise(rows) for a, b in zip(*pair, strict=True))


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 ranks"):
        lengths.balanced_order([1, 2, 3, 4], 3)
    with pytest.raises(ValueError, match="6 samples are no micro-batches of 2 for each of 2 ranks"):
        lengths.StepOrder(0, 100, 6, 2, 2, float)


CHANCE = random.Random(7)
COSTS = [CHANCE.paretovariate(1.2) for _ in range(100)]


def places(order, count=100):
    return [order.source(each) for each in range(count)]


def made(first=0, total=100, step=16, micro_batch=2, ranks=2):
    return lengths.StepOrder(first, total, step, micro_batch, ranks, COSTS.__getitem__)


def test_a_step_keeps_its_samples_and_a_micro_batch_too():
    found = places(made())
    assert sorted(found) == list(range(100)) and found != list(range(100))
    for start in range(0, 96, 16):
        assert sorted(found[start : start + 16]) == list(range(start, start + 16))
    for start in range(0, 100, 2):
        assert found[start] % 2 == 0 and found[start + 1] == found[start] + 1
    # Behind the last whole step nothing moves, and nothing does where all cost the same.
    assert found[96:] == [96, 97, 98, 99]
    assert places(lengths.StepOrder(0, 100, 16, 2, 2, lambda sample: 5)) == list(range(100))


def test_a_training_that_resumes_goes_on_in_the_same_order():
    whole = places(made())
    resumed = made(first=32)
    # Loaders ask out of order, and of several steps at once.
    asked = random.Random(1).sample(range(32, 100), 68)
    assert [resumed.source(each) for each in asked] == [whole[each] for each in asked]
    assert len(resumed._orders) == lengths.KEPT_STEPS
    # Of the steps before it has nothing to say.
    assert resumed.source(3) == 3
    # Loaders' workers may be spawned.
    assert places(pickle.loads(pickle.dumps(made()))) == whole


def test_documents_go_on_in_the_next_sample():
    def documents():
        return iter([3, 10, 2, 50])

    costs = sample_costs(documents(), 8, 3, 0)
    by_hand = [(3, 5), (5, 2, 1), (8,)]
    assert sorted(costs) == sorted(map(lengths.attention_pairs, by_hand))


def test_the_index_of_a_data_set_is_read(tmp_path):
    file = tmp_path / "set.idx"
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    file.write_bytes(head + struct.pack("<3i", 5, 70, 9) + bytes(60))
    assert list(read_index(file)) == [5, 70, 9]
    found = shuffled(read_index(file), 1)
    assert sorted(itertools.islice(found, 3)) == sorted(itertools.islice(found, 3)) == [5, 9, 70]
    damaged = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1 << 60, 4)
    for content, why in (
        (b"text", "is no index"),
        (head + bytes(8), "holds 2 lengths of 3"),
        (damaged + bytes(8), f"holds 2 lengths of {1 << 60}"),
        (head + bytes(60), "have 0 to 0 tokens"),
        (head + struct.pack("<3i", 5, -1, 9), "have -1 to 9 tokens"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            read_index(file)


def test_a_simulation_counts_as_by_hand():
    before, after, waiting = simulate_order([9, 1, 1, 1, 1, 1, 9, 1, 99], 2, 4)
    # Steps [9, 1, 1, 1] and [1, 1, 9, 1]; what is no whole step is left out. Even: 6 a rank and step.
    assert (before.step, before.micro_batch) == (20 / 12, 20 / 12)
    assert (after.step, waiting.micro_batch) == (20 / 12, 20 / 12)
    before, after, _ = simulate_order([9, 1, 9, 1], 2, 4)
    assert (before.step, after.step) == (18 / 10, 1.0)
    with pytest.raises(ValueError, match="no step of 4"):
        simulate_order([1, 2], 2, 4)
    with pytest.raises(ValueError, match="no micro-batches of 3"):
        simulate_order([1] * 8, 2, 4, 3)
