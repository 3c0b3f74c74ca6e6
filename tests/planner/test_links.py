"""Slow parts of drawn matrices are named, and nothing else; messages over measured links, and orders of ranks."""

from __future__ import annotations

import random

import pytest

from mindspeed_lite.planner import links, orders, parameters, read, slow_parts, traffic
from mindspeed_lite.planner.links import Links, MeasuredGroup
from mindspeed_lite.planner.work import CollectiveCall, Group

SHAPES = [(4, 1), (3, 1), (8, 1), (4, 2), (2, 4), (8, 8), (16, 4)]
NOISE = 0.12


def drawn(chance, hosts, ranks, slow=None, names=(), factor=1.0):
    """Links of `ranks` ranks on each host, log-normal noise, and one slow part."""
    host = [f"h{rank // ranks}" for rank in range(hosts * ranks)]

    def noise():
        return chance.lognormvariate(0, NOISE)

    def share(i, j):
        ends = {i, j} if slow == "rank" or (slow == "link" and isinstance(names[0], int)) else {host[i], host[j]}
        if slow == "host" and host[i] == host[j]:
            return 1.0
        is_slow = ends == {*names} if slow == "link" else bool(ends & {*names})
        return factor if slow in ("host", "rank", "link") and is_slow else 1.0

    every = range(len(host))
    rates = [[(5e10 if host[i] == host[j] else 5e9) * noise() / share(i, j) for j in every] for i in every]
    latency = [[(5e-6 if host[i] == host[j] else 3e-5) * noise() for j in every] for i in every]
    compute = [1e-3 * chance.lognormvariate(0, 0.02) * (factor if slow == "straggler" and i in names else 1)
               for i in every]  # fmt: skip
    return Links(host, rates, latency, compute)


def case(seed):
    """(links, kind, names) of a drawn slow part."""
    chance = random.Random(seed)
    kind = ("host", "link", "straggler", "rank", "cell")[seed % 5]
    hosts, ranks = chance.choice([each for each in SHAPES if each[1] > 1 or kind not in ("rank", "cell")])
    factor = chance.uniform(1.4, 3) if kind == "straggler" else chance.uniform(2.5, 10)
    world = hosts * ranks
    if kind == "host" or kind == "link":
        if hosts < 3:
            hosts, world = 3, 3 * ranks
        named = tuple(f"h{each}" for each in sorted(chance.sample(range(hosts), 1 if kind == "host" else 2)))
        return drawn(chance, hosts, ranks, kind, named, factor), kind, named
    places = sorted(chance.sample(range(world), 2 if kind == "cell" else 1))
    shown = tuple(f"rank {each} (h{each // ranks})" for each in places)
    if kind == "cell":
        if world < 8 or (ranks, places[0] // ranks) == (2, places[1] // ranks):
            return case(seed + 5 * 1000)  # the only link of a host's two ranks has nothing beside it
        return drawn(chance, hosts, ranks, "link", tuple(places), 10.0), "link", shown
    return drawn(chance, hosts, ranks, kind, tuple(places), factor), kind, shown


@pytest.mark.parametrize("seed", range(40))
def test_what_is_slow_is_named_and_nothing_else(seed):
    measured, kind, names = case(seed)
    found = slow_parts.slow_parts(measured)
    assert [(each.kind, each.names) for each in found] == [(kind, names)]


GPT = "x.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 --vocab-size 255".split()


def even(hosts, ranks, slow=frozenset()):
    """1 GB/s within a host, 100 MB/s between hosts, 10 MB/s between the two slow ones."""
    host = [f"h{rank // ranks}" for rank in range(hosts * ranks)]
    rates = [[1e9 if i == j else 1e7 if {i, j} == slow else 1e8 for j in host] for i in host]
    return Links(host, rates, [[1e-3] * len(host)] * len(host), [1.0] * len(host))


def test_a_message_takes_the_time_of_the_slowest_link_of_its_groups():
    found = even(4, 2, {"h0", "h1"})
    for kind, size, stride, expected in (
        ("all_reduce", 2, 1, 1e-3 * 2 + 1e6 / 1e9),
        ("all_gather", 4, 2, 1e-3 * 3**0.5 + 0.75e6 / 1e7),
        # Two ranks of a ring on each host: each host's adapters carry half.
        ("reduce_scatter", 8, 1, 1e-3 * 7**0.5 + 0.875e6 / 2e7),
        ("all_to_all", 4, 2, 1e-3 * 3**0.5 + 0.25e6 * (1 / 1e7 + 2 / 1e8)),
        ("send", 2, 4, 1e-3 + 1e6 / 1e8),
        ("send", 2, 2, 1e-3 + 1e6 / 1e7),
    ):
        assert found.message(CollectiveCall(kind, 1e6, Group(size, stride))) == pytest.approx(expected), (kind, size)
    # The stages 0, 1, 2, 3 of a pipeline: 1 -> 2 does not cross the slow link, 0 -> 1 does.
    assert found.message(CollectiveCall("send", 1e6, Group(2, 2, 4))) == pytest.approx(1e-3 + 1e6 / 1e7)
    measured = Links(found.hosts, found.bandwidth, found.latency, found.compute,
                     [MeasuredGroup("all_reduce", 2, 1, 5e8)])  # fmt: skip
    assert measured.message(CollectiveCall("all_reduce", 1e6, Group(2))) == pytest.approx(2e-3 + 1e6 / 5e8)


def test_bytes_of_a_step_are_those_of_its_messages():
    training = read([*GPT, "--micro-batch-size", "1", "--global-batch-size", "32"], 8)
    ((kind, group), count), *others = traffic.bytes_of_step(training, 2).items()
    assert (kind, group) == ("all_reduce", Group(8, 1)) and not others
    assert count == pytest.approx(
        2 * 7 / 8 * 4 * parameters.of_stage(training, *orders.chunks_of_ranks(training)).total
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_order_takes_the_ring_around_a_slow_link_and_keeps_hosts_together(ranks):
    found = even(4, ranks, {"h0", "h1"})
    sent = {("all_reduce", Group(4 * ranks)): 1e6}
    order = links.propose(found, sent)
    hosts = [found.hosts[each] for each in order]
    assert sorted(order) == [*range(4 * ranks)]
    assert all(len({*hosts[at : at + ranks]}) == 1 for at in range(0, 4 * ranks, ranks))
    ring = [*dict.fromkeys(hosts)]
    assert {"h0", "h1"} not in [{a, b} for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    gain = links.communication(found, sent, range(4 * ranks)) / links.communication(found, sent, order)
    assert gain == pytest.approx(10)


def test_noise_proposes_no_order():
    found = drawn(random.Random(1), 4, 2)
    assert links.propose(found, {("all_reduce", Group(8)): 1e6, ("all_gather", Group(2)): 1e6}) == [*range(8)]


@pytest.mark.parametrize(("hosts", "ranks", "block"), [(4, 2, 2), (2, 4, 4), (4, 1, 1), (1, 8, 1)])
def test_adjacent_ranks_with_fast_links_are_found(hosts, ranks, block):
    assert links.fast_block(drawn(random.Random(2), hosts, ranks)) == block
