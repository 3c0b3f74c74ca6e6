"""Copies of hot experts beside a router of known skew: `python -m benchmarks.balanced_experts`.

    python -m benchmarks.balanced_experts [--skews 4 1] [--sequence 1024] [--hidden 256] [--expert-hidden 1024]
                                          [--layers 2] [--experts 8] [--topk 2] [--micro-batches 4] [--repeats 6]
                                          [--copies 3] [--page docs/benchmarks/balanced-experts.md]

Two processes, a core each, train a model whose experts they share, with copies and without, A B A B. The router gives
the experts of the first rank a multiple of the tokens of the other rank's. What a copy costs is measured by the feature
itself, once for each skew. Imbalance is tokens of the fullest rank over the mean, predicted from the weights of the
router alone, and counted in the products of the steps that are timed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks import expert_model, page
from benchmarks.expert_model import RANKS
from benchmarks.ranks import Loopback, Rates, on_ranks
from mindspeed_lite.bench.statistics import paired_ratio

ARMS = ("off", "on")
FUSED = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_flash_attn",
         "use_gradient_accumulation_fusion", "use_fused_swiglu")  # fmt: skip


class _Counted:
    """Rows that this rank's experts multiply, and what the feature measures."""

    def __init__(self) -> None:
        from mindspeed_lite.parallel.balance import payoff
        from mindspeed_lite.patches import moe_grouped_gemm

        self.rows, self.break_even = 0, 0.0
        multiply, measure = moe_grouped_gemm.grouped_matmul, payoff.measure
        costs: Any = payoff

        @functools.wraps(multiply)
        def grouped_matmul(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.rows += len(x)
            found: torch.Tensor = multiply(x, *args, **kwargs)
            return found

        @functools.wraps(measure)
        def measured(*args: Any) -> Any:
            found = measure(*args)
            self.break_even = found.break_even
            return found

        moe_grouped_gemm.grouped_matmul, costs.measure = grouped_matmul, measured


def _training(options: argparse.Namespace) -> Any:
    width = options.expert_hidden
    return expert_model.training(
        options,
        options.experts,
        {"moe_router_topk": options.topk, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
        {"ffn_hidden_size": width, "moe_ffn_hidden_size": width},
    )


def _predicted(options: argparse.Namespace, skew: float, break_even: float) -> dict[str, float]:
    """Imbalance of each arm by the weights of the router, and how many copies are made."""
    from mindspeed_lite.parallel.balance import placement
    from mindspeed_lite.parallel.balance.replicas import SentTokens, hot_experts, rank_loads
    from tests.harness.skewed_router import weights_of

    weights = weights_of(skew, options.experts)
    tokens = RANKS * options.sequence * options.topk
    sent = SentTokens.evenly([tokens * each / sum(weights) for each in weights], RANKS)
    placed = placement.contiguous(options.experts, RANKS)
    copied = hot_experts(sent, placed, options.copies, break_even)
    mean = tokens / RANKS
    found = {arm: max(rank_loads(sent, placed, each)) / mean for arm, each in zip(ARMS, ((), copied), strict=True)}
    return {**found, "copies": len(copied)}


def _race(options: argparse.Namespace, skew: float, counted: _Counted) -> dict[str, Any]:
    from tests.harness import skewed_router

    uninstall = skewed_router.install(skew)
    training = _training(options)
    named = {"balanced_moe_hot_expert_num": options.copies}
    with mindspeed_lite.enabled(balanced_moe_experts=True, **named):
        training.step()
    flags = {"off": {}, "on": {"balanced_moe_experts": True, "balanced_moe_break_even": counted.break_even, **named}}
    told: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats + 1):
        for arm in ARMS:
            with mindspeed_lite.enabled(**flags[arm]):
                counted.rows = 0
                dist.barrier()
                start = time.perf_counter()
                training.step()
                mine = time.perf_counter() - start, counted.rows
            if repeat:
                told[arm].append(mine)
    uninstall()
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, told)
    steps = {arm: [*zip(*(each[arm] for each in every), strict=True)] for arm in ARMS}
    seconds = {arm: [max(rank[0] for rank in step) for step in steps[arm]] for arm in ARMS}
    imbalance = {
        arm: max(sum(step[rank][1] for step in steps[arm]) for rank in range(RANKS))
        * RANKS / sum(rank[1] for step in steps[arm] for rank in step)
        for arm in ARMS
    }  # fmt: skip
    ratio = paired_ratio(seconds["off"], seconds["on"])
    assert ratio is not None
    return {
        "skew": skew,
        "break_even": counted.break_even,
        "predicted": _predicted(options, skew, counted.break_even),
        "imbalance": imbalance,
        "seconds": {arm: statistics.median(each) for arm, each in seconds.items()},
        "ratio": [ratio.ratio, ratio.low, ratio.high],
    }


def _measure(options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    counted = _Counted()
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        return [_race(options, skew, counted) for skew in options.skews]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balanced_experts", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--skews", type=float, nargs="+", default=[4.0, 1.0])
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--expert-hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    rows = on_ranks(RANKS, Loopback(), functools.partial(_measure, options))
    text = _page(options, rows, page.command("balanced_experts", arguments))
    page.write(options, text)
    return 0


def _page(options: argparse.Namespace, rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# Copies of hot experts",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{RANKS} processes, a core each, gloo on loopback. {options.layers} layers of {options.hidden}, "
        f"{options.experts} experts of {options.expert_hidden}, {options.topk} a token, {options.micro_batches} "
        f"micro-batches of {options.sequence} tokens a process, bf16; at most {options.copies} copies. Pairs of a step "
        f"without `balanced_moe_experts` and with it, A B A B, {options.repeats}; medians, the ratio with its 95 % "
        "interval.",
        "",
        "| skew | a copy pays from | copies | imbalance off, predicted | counted | on, predicted | counted | off | on "
        "| off / on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio, low, high = row["ratio"]
        cells = [
            f"{row['skew']:g} : 1",
            f"{row['break_even']:.0f} tokens",
            str(row["predicted"]["copies"]),
            *(f"{row[kind][arm]:.3f}" for arm in ARMS for kind in ("predicted", "imbalance")),
            *(f"{1e3 * row['seconds'][arm]:.0f} ms" for arm in ARMS),
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*imbalance*: tokens of the fullest rank over the mean, all layers and micro-batches. *skew*: tokens of an "
        "expert of the first rank to one of the second.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
