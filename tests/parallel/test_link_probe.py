"""Who meets whom when links are measured, and links of known speed as they are measured."""

from __future__ import annotations

import itertools

import pytest
import torch

from lab.network import Delays
from mindspeed_lite.parallel import link_probe
from mindspeed_lite.parallel.link_probe import ALL_PAIRS, LinkProbe, host_names, rounds
from mindspeed_lite.planner import slow_parts
from mindspeed_lite.planner.links import Links
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 2), (1, 5), (4, 1), (4, 2), (3, 4), (16, 8)])
def test_all_pairs_meet_once_and_of_many_ranks_one_of_each_host(hosts, ranks):
    world = hosts * ranks
    met: list[tuple[int, int]] = []
    found = [*rounds([f"h{rank // ranks}" for rank in range(world)])]
    for peers in found:
        assert all(peers[peers[rank]] == rank for rank in range(world))
        met += [(rank, peer) for rank, peer in enumerate(peers) if rank < peer]
        # Links between hosts are shared by as many pairs as a host has ranks, or by none.
        between = [rank for rank, peer in enumerate(peers) if peer // ranks != rank // ranks]
        assert len(between) in (0, world, world - ranks)
    assert len({*met}) == len(met)
    if world <= ALL_PAIRS:
        assert sorted(met) == [*itertools.combinations(range(world), 2)] and len(found) <= world + ranks
    else:
        assert len(found) == ranks - 1 + hosts - 1
        assert {(i // ranks, j // ranks) for i, j in met} >= {*itertools.combinations(range(hosts), 2)}


def test_hosts_of_unequal_size_meet_all_the_same():
    found = [*rounds(["a", "a", "b"])]
    assert sorted((i, j) for peers in found for i, j in enumerate(peers) if i < j) == [(0, 1), (0, 2), (1, 2)]


def test_slow_links_of_64_ranks_are_measured_in_a_minute():
    """In both directions; faster ones take less."""
    found = [*rounds([f"h{rank // 8}" for rank in range(64)])]
    assert 2 * len(found) * link_probe._REPEATS * link_probe._SECONDS < 55


def test_machines_with_the_same_name_are_told_apart():
    assert host_names([("a", "1"), ("a", "1"), ("a", "2"), ("b", "3")]) == ["a(0)", "a(0)", "a(1)", "b"]


class _Slow(Delays):
    """80 Mbit/s, and 8 between the ranks 0 and 1."""

    def _link(self, peer):
        import torch.distributed as dist

        link = super()._link(peer)
        link.megabits = 8.0 if {peer, dist.get_rank()} == {0, 1} else 80.0
        return link


@forked("torch")
def test_a_slow_link_is_measured_and_named(tmp_path):
    def body(rank):
        slow = _Slow(80.0, latency=0.002)
        slow.enter()
        joined(rank, 4, tmp_path)
        probe = LinkProbe(f"h{rank}", torch.device("cpu"))
        bandwidth, latency = probe.pairs(lambda *given: None)
        found = Links(probe.hosts, bandwidth, latency, [1.0] * 4)
        for i, j in itertools.permutations(range(4), 2):
            assert bandwidth[i][j] == pytest.approx(1e6 if {i, j} == {0, 1} else 1e7, rel=0.3)
        (part,) = [each for each in slow_parts.slow_parts(found) if each.what == "bandwidth"]
        assert (part.kind, part.names) == ("link", ("h0", "h1"))
        rates = {
            kind: probe.group_rate(kind, 2, 1, 0.5, 1e6) for kind in ("all_gather", "reduce_scatter", "all_to_all")
        }
        assert all(rate > 0 for rate in rates.values()) and len(probe.compute()) == 4

    on_ranks(4, body)
