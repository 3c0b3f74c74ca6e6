"""Experts' exchange overlapped with computation: `moe_fb_overlap` and `moe_alltoall_overlap_comm`.

On a link as fast as it goes, and on links over which a step's exchange takes shares of its computation. With
`moe_fb_overlap` nothing overlaps in the first forward pass and the last backward pass of a step;
`moe_alltoall_overlap_comm` is measured with a shared expert.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import mindspeed_lite
from benchmarks.expert_balance import RANKS, expert_training
from benchmarks.harness import LINK, OFF_ON, RATIOS, WAITS, Benchmark, Options, Row, over_shares
from lab import streams
from lab.ranks import Measure, Rates, compare, on_ranks, slowest, timed
from lab.timeline import Timeline, is_megatrons_expert_group

COMBINED, BETWEEN = "moe_fb_overlap", "moe_alltoall_overlap_comm"
FUSED = ("delay_wgrad_compute", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_flash_attn",
         "use_gradient_accumulation_fusion")  # fmt: skip


def _trainings(options: Options, feature: str) -> dict[str, Any]:
    # Or ranks wait for the one with more tokens, which is no matter of messages.
    moe = {"moe_router_force_load_balancing": True}
    sizes = {"ffn_hidden_size": 2 * options.hidden}
    on = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if feature == BETWEEN:
        sizes["moe_shared_expert_intermediate_size"] = 2 * options.hidden
        on = {"moe_shared_expert_overlap": True}
    off = expert_training(options, 4, moe, sizes)
    with_it = expert_training(options, 4, moe, {**sizes, **on}, ddp_delay_wgrad_compute=feature == COMBINED)
    for training in (off, with_it):
        # Gradients are reduced over the same link, once a step, and the same in both arms.
        training.config.finalize_model_grads_func = None
    return {"off": off, "on": with_it}


def _rows(options: Options, rates: Rates) -> list[Row]:
    timeline = Timeline(is_megatrons_expert_group)
    # Before the emulated streams, which wait for messages through it.
    timeline.install()
    rows: list[Row] = []
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        streams.install()
        for feature in options.features:
            rows += _of_feature(options, feature, timeline, rates)
    return rows


def _of_feature(options: Options, feature: str, timeline: Timeline, rates: Rates) -> list[Row]:
    trainings = _trainings(options, feature)

    def run(arm: str) -> Measure:
        trainings[arm].zero()
        with mindspeed_lite.enabled(**({feature: True} if arm == "on" else {})):
            return Measure(timed(trainings[arm].forward_backward, timeline), timeline.waited_for_experts)

    compare(("off", "on"), 1, run)
    found = over_shares(
        options.shares,
        rates,
        lambda: slowest(sum(timeline.sent.values())),
        lambda: compare(("off", "on"), options.repeats, run),
    )
    return [{"feature": feature, **row} for row in found]


BENCHMARK = Benchmark(
    name="expert_overlap",
    title="Experts' exchange overlapped with computation",
    about="Two processes, a core each, modelled links: {layers} layers of {hidden}, 4 experts, 2 a token, "
    f"{{micro_batches}} micro-batches of {{sequence}} tokens, bf16. {RATIOS}",
    columns={
        "feature": lambda row: f"`{row['feature']}`",
        **LINK,
        **OFF_ON,
        **WAITS,
    },
    measure=lambda options: on_ranks(RANKS, partial(_rows, options)),
    options={"features": [COMBINED, BETWEEN], "sequence": 256, "hidden": 512, "layers": 2, "micro_batches": 8,
             "repeats": 4, "shares": [0.25, 0.5]},
    tiny={"sequence": 32, "hidden": 64, "micro_batches": 2, "repeats": 1, "shares": [0.5]},
    choices={"features": [COMBINED, BETWEEN]},
    note="*waits*: of the slowest rank, for messages of experts. *hidden*: of the waits without the feature.",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
