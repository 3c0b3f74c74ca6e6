"""Experts' tokens on two levels: outputs and every gradient against one process in float64, and what crosses nodes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel.expert import hierarchy
from mindspeed_lite.parallel.expert.exchange import AllToAll
from mindspeed_lite.parallel.expert.hierarchy import padded_map
from mindspeed_lite.parallel.node_groups import NodeGroups, ranks_per_node
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks
from tests.parallel.expert_hierarchy import HIDDEN, Counted, Problem, definition, rows_expected, run

# Ranks of a node -> problems: one expert for each token to all of them, ranks without tokens, experts without.
PROBLEMS = [
    Problem(4, 8, (5, 3, 0, 7), 1),
    Problem(4, 8, (6, 6, 6, 6), 8),
    Problem(4, 12, (9, 4, 5, 2), 5, idle=(3, 4, 5, 7)),
    Problem(4, 4, (0, 0, 5, 0), 2),
    Problem(4, 20, (0, 0, 0, 0), 3),
]
NAMES = ("output", "d tokens", "d probs", "d weight")


@forked("features")
@pytest.mark.parametrize("size", [1, 2])
def test_outputs_and_gradients_are_those_of_one_process(tmp_path, size):
    def body(rank):
        nodes = NodeGroups(joined(rank, 4, tmp_path), size)
        for problem in PROBLEMS:
            exact = definition(problem)
            found = run(problem, rank, nodes)
            assert torch.equal(found["rows"], rows_expected(problem, rank)), "Megatron's rows in Megatron's order"
            for name in NAMES:
                torch.testing.assert_close(found[name], exact[name][rank], msg=f"{problem}: {name}")
        again = NodeGroups(nodes.group, size)
        assert again.between is nodes.between and again.within is nodes.within
        dist.barrier()

    on_ranks(4, body)


@forked("features")
def test_sums_within_a_node_are_in_fp32(tmp_path):
    """bf16: against float64 of the same rounded inputs, three roundings of a result and no more."""

    def body(rank):
        nodes = NodeGroups(joined(rank, 4, tmp_path), 2)
        problem = Problem(4, 16, (40, 40, 40, 40), 8)
        x, routing_map, _, _ = problem.of_rank(rank)
        route = hierarchy.route_of(routing_map, nodes)
        x = (4 * x).round().clamp(-15, 15).bfloat16()
        arrived = hierarchy.spread(hierarchy.spread(x, route.tokens.to_nodes), route.tokens)
        out = hierarchy.collect(hierarchy.collect(arrived, route.tokens), route.tokens.to_nodes)
        # Each of 8 copies comes back: the sum is 8 x, exact in bf16 for small whole numbers, and so are its parts.
        assert torch.equal(out, 8 * x)
        arrived = (arrived * torch.linspace(0.5, 1.5, HIDDEN)).bfloat16()
        # Another factor for every row: what a row has become is known to its own expert alone.
        factors = 1 + torch.arange(len(arrived), dtype=torch.bfloat16).remainder(7).unsqueeze(-1) / 8
        y = arrived * factors
        out = hierarchy.collect(hierarchy.collect(y, route.tokens), route.tokens.to_nodes)
        exact = hierarchy.collect(hierarchy.collect(y.double(), route.tokens), route.tokens.to_nodes)
        size = hierarchy.collect(hierarchy.collect(y.double().abs(), route.tokens), route.tokens.to_nodes)
        # A node's partial sum is rounded once, and the sum over nodes once.
        assert bool(((out.double() - exact).abs() <= 2 * 2.0**-8 * 1.01 * size).all())
        own, sent = AllToAll.run, []
        AllToAll.run = lambda exchange, x: sent.append(x.dtype) or own(exchange, x)
        hierarchy.collect(y, route.tokens)
        hierarchy.spread(x, route.tokens.to_nodes)
        assert sent == [torch.float32, torch.bfloat16], "within the node, then between nodes"

    on_ranks(4, body)


def rows_to(routing_map, places):
    """Tokens that want an expert of each place."""
    return routing_map.reshape(len(routing_map), places, routing_map.shape[1] // places).any(-1).sum(0).tolist()


def pairs_to(routing_map, places):
    return routing_map.reshape(len(routing_map), places, routing_map.shape[1] // places).sum((0, 2)).tolist()


@forked("features")
@pytest.mark.parametrize("size", [1, 2])
def test_bytes_between_nodes_are_a_row_for_each_token_and_node(tmp_path, size):
    def body(rank):
        nodes = NodeGroups(joined(rank, 4, tmp_path), size)
        problem = Problem(4, 32, (50, 60, 0, 70), 8)
        counted = Counted(4)
        run(problem, rank, nodes, torch.float32)
        rows = rows_to(problem.of_rank(rank)[1], 4 // size)
        received = [rows_to(problem.of_rank(peer)[1], 4 // size)[rank // size] for peer in range(rank % size, 4, size)]
        # There and back again in both passes, and each time only to the peer of the same place.
        for node, (there, back) in enumerate(zip(rows, received, strict=True)):
            for rank_there in range(node * size, (node + 1) * size):
                if node != rank // size:
                    wanted = 2 * (there + back) * HIDDEN * 4 if rank_there % size == rank % size else 0
                    assert counted.rows[rank_there] == wanted
        elsewhere = [peer for peer in range(4) if peer // size != rank // size]
        # Probabilities of pairs there and their gradients back, and a byte for each expert there of which rows go.
        pairs = pairs_to(problem.of_rank(rank)[1], 4)
        back = [pairs_to(problem.of_rank(peer)[1], 4) for peer in range(4)]
        probs = sum(pairs[peer] for peer in elsewhere)
        probs += sum(
            back[peer][mate]
            for peer in elsewhere
            if peer % size == rank % size
            for mate in range(rank // size * size, (rank // size + 1) * size)
        )
        indices = sum(count for node, count in enumerate(rows) if node != rank // size) * 32 * size // 4
        assert sum(counted.rest[peer] for peer in elsewhere) == 8 * probs + indices

    on_ranks(4, body)


def test_layouts():
    assert ranks_per_node(range(8), 2) == 2 and ranks_per_node(range(8), 1) == 1
    assert ranks_per_node([0, 2, 4, 6], 4) == 2, "tensor-parallel experts: every other rank of a node"
    assert ranks_per_node([4, 5, 8, 9], 4) == 2
    for ranks, size, text in (
        (range(4), 4, "on one node of 4"),
        (range(4, 8), 8, "on one node of 8"),
        (range(6), 4, "not equally many"),
        (range(2, 6), 3, "not equally many"),
        ([0, 2, 1, 3], 2, "not equally many"),
    ):
        with pytest.raises(ValueError, match=text):
            ranks_per_node(ranks, size)


def test_the_map_of_padded_experts():
    routing_map = torch.tensor([[0, 1], [1, 1], [0, 0], [0, 1]], dtype=torch.bool)
    wanted = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]], dtype=torch.bool)
    assert torch.equal(padded_map(routing_map, 2), wanted), "expert 0 takes token 0 too, and expert 1 its first two"
