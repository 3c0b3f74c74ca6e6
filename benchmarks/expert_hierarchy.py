"""Experts' exchange on two levels against one: `python -m benchmarks.expert_hierarchy`.

    python -m benchmarks.expert_hierarchy [--hosts 4] [--ranks-per-host 2] [--tokens 256] [--hidden 512] [--experts 32]
                                          [--topk 8] [--between 100 400] [--within 4000] [--repeats 4]
                                          [--page docs/benchmarks/expert-hierarchy.md]

Each process is a rank with its share of the experts; its tokens choose experts at random, all equally likely. A pass is
Megatron's dispatcher with experts that only weigh rows: permutation, exchange there and back, sums, and their backward
passes. Without `moe_hierarchical_alltoallv` and with it, A B A B, on links between hosts and within them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks import page
from lab.network import laboratory
from lab.ranks import Measure, Rates, compare, on_ranks
from lab.timeline import DISPATCH, Timeline

ARMS = ("off", "on")
NAME = "moe_hierarchical_alltoallv"


class _Exchange:
    """One rank's tokens, and passes of Megatron's dispatcher over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        ranks, rank = dist.get_world_size(), dist.get_rank()
        if not ps.model_parallel_is_initialized():
            ps.initialize_model_parallel(expert_model_parallel_size=ranks)
        config = TransformerConfig(
            num_layers=1, hidden_size=options.hidden, num_attention_heads=1, num_moe_experts=options.experts,
            moe_router_topk=options.topk, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=ranks,
            moe_permute_fusion=True, bf16=True, params_dtype=torch.bfloat16, add_bias_linear=False,
        )  # fmt: skip
        each = options.experts // ranks
        mine = [*range(rank * each, (rank + 1) * each)]
        self.dispatcher = MoEAlltoAllTokenDispatcher(each, mine, config, get_default_pg_collection())
        made = torch.Generator().manual_seed(rank)
        scores = torch.rand(options.tokens, options.experts, generator=made)
        chosen = scores.topk(options.topk, -1).indices
        self.routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        self.probs = (scores * self.routing_map).requires_grad_()
        shape = (options.tokens, 1, options.hidden)
        self.x = torch.randn(shape, generator=made).bfloat16().requires_grad_()
        self.dy = torch.randn(shape, generator=made).bfloat16()

    def forward_backward(self) -> torch.Tensor:
        dispatcher = self.dispatcher
        self.x.grad = self.probs.grad = None
        rows, probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(self.x, self.routing_map, self.probs))
        rows, _, probs = dispatcher.dispatch_postprocess(rows, probs)
        weighed = rows * probs.unsqueeze(-1).to(rows.dtype)
        out: torch.Tensor = dispatcher.combine_postprocess(
            dispatcher.token_combine(dispatcher.combine_preprocess(weighed))
        )
        out.backward(self.dy)  # type: ignore[no-untyped-call]
        return out.detach()


def _race(exchange: _Exchange, timeline: Timeline, repeats: int, hosts: int) -> dict[str, Any]:
    """Compare the arms; adds the bytes that leave a host in a pass."""
    sent: dict[str, int] = {}
    size = dist.get_world_size() // hosts

    def run(arm: str) -> Measure:
        flags = {NAME: True, "moe_node_size": size} if arm == "on" else {}
        with mindspeed_lite.enabled(**flags):
            # The first pass of a session makes its groups.
            for _ in range(2):
                dist.barrier()
                start = time.perf_counter()
                with timeline, timeline.expert_call(DISPATCH, [exchange.dispatcher.ep_group]):
                    exchange.forward_backward()
                seconds = time.perf_counter() - start
        host = dist.get_rank() // size
        sent[arm] = sum(each for peer, each in timeline.sent.items() if peer // size != host)
        return Measure(seconds)

    found = compare(ARMS, repeats, run)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sent)
    return {**found, "bytes": {arm: sum(each[arm] for each in every) / hosts for arm in ARMS}}


def _pairs_and_rows(routing_map: torch.Tensor, hosts: int) -> tuple[list[int], list[int]]:
    """(token, expert) pairs, and tokens, for each host's experts; routing_map: [T, E] bool."""
    by_host = routing_map.reshape(len(routing_map), hosts, -1)
    return by_host.sum((0, 2)).tolist(), by_host.any(-1).sum(0).tolist()


def _measure(options: argparse.Namespace, timeline: Timeline, rates: Rates) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks_per_host)
    rows: list[dict[str, Any]] = []
    with mindspeed_lite.enabled(moe_permute_fusion=True):
        exchange = _Exchange(options)
        host = dist.get_rank() // options.ranks_per_host
        leaving = torch.tensor(
            [
                sum(count for node, count in enumerate(counts) if node != host)
                for counts in _pairs_and_rows(exchange.routing_map, options.hosts)
            ]
        )
        dist.all_reduce(leaving)
        for between in (None, *options.between):
            within = None if between is None else options.within
            rates.set(between, within)
            rows.append(
                {"between": between, "within": within, **_race(exchange, timeline, options.repeats, options.hosts)}
            )
        rates.set(None)
    # Rows go there and come back, in both passes.
    row = 2 * 2 * 2 * options.hidden
    return {
        "rows": rows,
        "predicted": dict(zip(ARMS, (row * each / options.hosts for each in leaving.tolist()), strict=True)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_hierarchy", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--between", type=float, nargs="+", default=[100, 400], metavar="MBIT")
    parser.add_argument("--within", type=float, default=4000, metavar="MBIT")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    ranks = options.hosts * options.ranks_per_host
    if options.hosts < 2 or options.experts % ranks:
        parser.error(f"{options.experts} experts cannot be divided among {ranks} ranks on at least 2 hosts")
    if options.repeats < 2:
        parser.error("--repeats takes at least 2: an interval wants them")
    timeline = Timeline()
    # Megatron takes the collectives by value; it is imported once, and not by each rank.
    remove = timeline.install()
    importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    with laboratory(ranks, options.ranks_per_host) as (network, reason):
        found = on_ranks(ranks, network, functools.partial(_measure, options, timeline))
    remove()
    text = _page(options, found, reason, page.command("expert_hierarchy", arguments))
    page.write(options, text)
    return 0


def _page(options: argparse.Namespace, found: dict[str, Any], reason: str | None, command: str) -> str:
    kind = page.links(reason)
    # The mean number of hosts that hold one of a token's experts.
    elsewhere = options.experts - options.experts // options.hosts
    copies = options.hosts * (1 - math.comb(elsewhere, options.topk) / math.comb(options.experts, options.topk))
    sent, predicted = found["rows"][0]["bytes"], found["predicted"]
    lines = [
        "# Experts' exchange on two levels",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{options.hosts} hosts of {options.ranks_per_host} processes; {kind}. {options.tokens} tokens of "
        f"{options.hidden} a process in bf16, {options.experts} experts, {options.topk} a token, all equally likely. "
        f"Pairs of a pass without `{NAME}` and with it, A B A B, {options.repeats}; medians, the ratio with its 95 % "
        "interval. A pass is the dispatcher forward and backward, with experts that only weigh rows.",
        "",
        "| between hosts | within | off | on | off / on |",
        "|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = [
            *(page.rate(row[tier]) for tier in ("between", "within")),
            *(page.ms(row["seconds"][arm]) for arm in ARMS),
            row["ratio"],
        ]
        lines.append(page.row(cells))
    lines += [
        "",
        "| leaves a host in a pass | off | on | off / on |",
        "|---|---|---|---|",
        f"| counted, with probabilities and indices | {_mib(sent['off'])} | {_mib(sent['on'])} | "
        f"{sent['off'] / sent['on']:.2f} |",
        f"| rows of tokens, by the routing | {_mib(predicted['off'])} | {_mib(predicted['on'])} | "
        f"{predicted['off'] / predicted['on']:.2f} |",
        "",
        f"Expected of such a routing: {copies:.2f} copies of a token instead of {options.topk}, "
        f"{options.topk / copies:.2f} times fewer.",
        "",
    ]
    return "\n".join(lines)


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
