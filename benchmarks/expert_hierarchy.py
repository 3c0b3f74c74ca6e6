"""Experts' exchange on two levels (`moe_hierarchical_alltoallv`) against one.

A pass is Megatron's dispatcher with experts that only weigh rows: permutation, exchange there and back, sums, and their
backward passes, on links between hosts and within them. All experts are equally likely.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks.harness import OFF_ON, RATIOS, Benchmark, Options, Row, rate
from lab.ranks import Measure, Rates, compare, gathered, on_ranks, timed
from lab.timeline import Timeline
from mindspeed_lite.bench.wording import size

NAME = "moe_hierarchical_alltoallv"


class _Exchange:
    """One rank's tokens, and passes of Megatron's dispatcher over them."""

    def __init__(self, options: Options) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        ranks, rank = dist.get_world_size(), dist.get_rank()
        ps.initialize_model_parallel(expert_model_parallel_size=ranks)
        config = TransformerConfig(
            num_layers=1, hidden_size=options.hidden, num_attention_heads=1, num_moe_experts=options.experts,
            moe_router_topk=options.topk, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=ranks,
            moe_permute_fusion=True, bf16=True, params_dtype=torch.bfloat16, add_bias_linear=False,
        )  # fmt: skip
        each = options.experts // ranks
        mine = [*range(rank * each, (rank + 1) * each)]
        self.dispatcher = MoEAlltoAllTokenDispatcher(each, mine, config, get_default_pg_collection())
        generator = torch.Generator().manual_seed(rank)
        scores = torch.rand(options.tokens, options.experts, generator=generator)
        chosen = scores.topk(options.topk, -1).indices
        self.routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        self.probs = (scores * self.routing_map).requires_grad_()
        shape = (options.tokens, 1, options.hidden)
        self.x = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        self.dy = torch.randn(shape, generator=generator).bfloat16()

    def forward_backward(self) -> None:
        dispatcher = self.dispatcher
        self.x.grad = self.probs.grad = None
        rows, probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(self.x, self.routing_map, self.probs))
        rows, _, probs = dispatcher.dispatch_postprocess(rows, probs)
        weighed = dispatcher.combine_preprocess(rows * probs.unsqueeze(-1).to(rows.dtype))
        dispatcher.combine_postprocess(dispatcher.token_combine(weighed)).backward(self.dy)


def _rows(options: Options, timeline: Timeline, rates: Rates) -> list[Row]:
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks_per_host)
    per_host, rows = options.ranks_per_host, []
    with mindspeed_lite.enabled(moe_permute_fusion=True):
        exchange = _Exchange(options)
        sent: dict[str, int] = {}

        def run(arm: str) -> Measure:
            with mindspeed_lite.enabled(**({NAME: True, "moe_node_size": per_host} if arm == "on" else {})):
                # The first pass of a session makes its groups.
                for _ in range(2):
                    seconds = timed(exchange.forward_backward, timeline)
            host = dist.get_rank() // per_host
            sent[arm] = sum(each for peer, each in timeline.sent.items() if peer // per_host != host)
            return Measure(seconds)

        for between in (None, *options.between):
            within = None if between is None else options.within
            rates.set(between, within)
            measured = compare(("off", "on"), options.repeats, run)
            every = gathered(sent)
            leaving = {arm: sum(each[arm] for each in every) / options.hosts for arm in sent}
            rows.append({"rate": between, "within": within, "leaving": leaving, **measured})
        rates.set(None)
    return rows


def _measure(options: Options) -> list[Row]:
    timeline = Timeline(is_of_experts=lambda group: True)
    # Megatron takes the collectives by value; it is imported once, and not by each rank.
    remove = timeline.install()
    importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    rows: list[Row] = on_ranks(
        options.hosts * options.ranks_per_host, partial(_rows, options, timeline), options.ranks_per_host
    )
    remove()
    return rows


BENCHMARK = Benchmark(
    name="expert_hierarchy",
    title="Experts' exchange on two levels",
    about="{hosts} hosts of {ranks_per_host} processes, modelled links, with and without `moe_hierarchical_alltoallv`: "
    f"{{tokens}} tokens of {{hidden}} a process in bf16, {{experts}} experts, {{topk}} a token. {RATIOS}",
    columns={
        "between hosts": lambda row: rate(row["rate"]),
        "within": lambda row: rate(row["within"]),
        **OFF_ON,
        "leaves a host, off": lambda row: size(row["leaving"]["off"]),
        "leaves a host, on": lambda row: size(row["leaving"]["on"]),
    },
    measure=_measure,
    options={"hosts": 4, "ranks_per_host": 2, "tokens": 256, "hidden": 512, "experts": 32, "topk": 8,
             "between": [100.0, 400.0], "within": 4000.0, "repeats": 4},
    tiny={"hosts": 2, "ranks_per_host": 1, "tokens": 16, "hidden": 64, "experts": 8, "topk": 2, "between": [100.0],
          "repeats": 1},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
