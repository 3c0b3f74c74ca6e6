"""Balancing of experts with a router of known skew: copies of hot experts, or experts that change places.

The router gives the experts of the first rank a multiple of the tokens of the other rank's. Each time that a feature is
enabled, one step sees the load and balances, and the next step is timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

import mindspeed_lite
from benchmarks.harness import OFF_ON, RATIOS, Benchmark, Options, Row
from lab.ranks import Measure, Rates, compare, gathered, on_ranks, timed

RANKS = 2
FUSED = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_flash_attn",
         "use_gradient_accumulation_fusion", "use_fused_swiglu")  # fmt: skip
COPIES, PLACES = "balanced_moe_experts", "enable_expert_placement"


def expert_training(
    options: Options, experts: int, moe: Mapping[str, Any], config: Mapping[str, Any], **others: Any
) -> Any:
    """A training on ranks that share `experts` experts, with Megatron's fused forms."""
    from tests.harness import core_loop

    core_loop.SEQUENCE, core_loop.MICRO_BATCH = options.sequence, 1
    return core_loop.Training(
        {
            "experts": experts,
            "ep": RANKS,
            "layers": options.layers,
            "micro_batches": options.micro_batches,
            "wgrad_fusion": True,
            "no_sync": True,
            "moe": {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True, **moe},
            "config": {"hidden_size": options.hidden, **config},
            **others,
        }
    )


def _count_rows() -> list[int]:
    """The rows that this rank's experts multiply from now on, summed in the list's one element."""
    from mindspeed_lite.patches import moe_grouped_gemm

    count, multiply = [0], moe_grouped_gemm.grouped_matmul

    @functools.wraps(multiply)
    def grouped_matmul(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += len(x)
        return multiply(x, *args, **kwargs)

    moe_grouped_gemm.grouped_matmul = grouped_matmul
    return count


def _rows(options: Options, rates: Rates) -> list[Row]:
    from tests.harness import skewed_router

    multiplied, found = _count_rows(), []
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        for skew in options.skews:
            uninstall = skewed_router.install(skew)
            found.append({"skew": skew, **_compared(options, multiplied)})
            uninstall()
    return found


def _compared(options: Options, multiplied: list[int]) -> Row:
    moe = {"moe_router_topk": options.topk, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    width = {"ffn_hidden_size": options.expert_hidden, "moe_ffn_hidden_size": options.expert_hidden}
    training = expert_training(options, options.experts, moe, width)
    copies, places = {"balanced_moe_hot_expert_num": options.copies}, {"expert_placement_freq": 1}
    flags: dict[str, Any] = {options.feature: True, **(copies if options.feature == COPIES else places)}
    counted = {"off": 0, "on": 0}

    def run(arm: str) -> Measure:
        with mindspeed_lite.enabled(**(flags if arm == "on" else {})):
            if arm == "on":
                training.step()
            multiplied[0] = 0
            seconds = timed(training.step)
        counted[arm] += multiplied[0]
        return Measure(seconds)

    measured = compare(("off", "on"), options.repeats, run)
    every = gathered(counted)
    loads = {arm: [rank[arm] for rank in every] for arm in counted}
    return {**measured, "imbalance": {arm: max(each) * RANKS / sum(each) for arm, each in loads.items()}}


BENCHMARK = Benchmark(
    name="expert_balance",
    title="Balancing of experts",
    about="Two processes, a core each, with and without `{feature}`: {layers} layers of {hidden}, {experts} experts of "
    f"{{expert_hidden}}, {{topk}} a token, {{micro_batches}} micro-batches of {{sequence}} tokens, bf16. {RATIOS}",
    columns={
        "skew": lambda row: f"{row['skew']:g} : 1",
        "imbalance off": lambda row: f"{row['imbalance']['off']:.3f}",
        "imbalance on": lambda row: f"{row['imbalance']['on']:.3f}",
        **OFF_ON,
    },
    measure=lambda options: on_ranks(RANKS, functools.partial(_rows, options)),
    options={"feature": COPIES, "skews": [4.0, 1.0], "sequence": 1024, "hidden": 256, "expert_hidden": 1024,
             "layers": 2, "experts": 8, "topk": 2, "micro_batches": 4, "repeats": 6, "copies": 3},
    tiny={"skews": [4.0], "sequence": 64, "hidden": 64, "expert_hidden": 64, "layers": 1, "micro_batches": 1,
          "repeats": 1},
    choices={"feature": [COPIES, PLACES]},
    note="*skew*: tokens of an expert of the first rank to one of the second. *imbalance*: tokens of the fullest rank "
    "over the mean, as counted. An exchange of places must pay within the next step.",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
