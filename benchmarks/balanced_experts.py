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
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import mindspeed_lite
from benchmarks import page, skewed_experts
from benchmarks.expert_model import RANKS
from benchmarks.skewed_experts import ARMS, Race


def _predicted(options: argparse.Namespace, skew: float, break_even: float) -> dict[str, float]:
    """Imbalance of each arm by the weights of the router, and how many copies are made."""
    from mindspeed_lite.parallel.balance import placement
    from mindspeed_lite.parallel.balance.placement import SentTokens, hot_experts, loads_with_copies
    from tests.harness.skewed_router import weights_of

    weights = weights_of(skew, options.experts)
    tokens = RANKS * options.sequence * options.topk
    sent = SentTokens.evenly([tokens * each / sum(weights) for each in weights], RANKS)
    placed = placement.contiguous(options.experts, RANKS)
    copied = hot_experts(sent, placed, options.copies, break_even)
    mean = tokens / RANKS
    loads = [loads_with_copies(sent, placed, each) for each in ((), copied)]
    found = {arm: max(each) / mean for arm, each in zip(ARMS, loads, strict=True)}
    return {**found, "copies": len(copied)}


def _break_even(race: Race, flags: dict[str, Any]) -> float:
    """What the feature measures in its first step."""
    from mindspeed_lite.patches import balanced_moe_experts

    told, measure = [], balanced_moe_experts.measure_costs

    def measured(*args: Any) -> Any:
        told.append(measure(*args))
        return told[-1]

    with mock.patch.object(balanced_moe_experts, "measure_costs", measured), mindspeed_lite.enabled(**flags):
        race.training.step()
    return float(told[-1].break_even)


def _race(race: Race) -> dict[str, Any]:
    on = {"balanced_moe_experts": True, "balanced_moe_hot_expert_num": race.options.copies}
    on["balanced_moe_break_even"] = break_even = _break_even(race, on)
    for _ in range(race.options.repeats + 1):
        race.step("off")
        with mindspeed_lite.enabled(**on):
            race.step("on")
    return {
        "break_even": break_even,
        "predicted": _predicted(race.options, race.skew, break_even),
        **race.found(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = skewed_experts.parser("balanced_experts", (__doc__ or "").split(":")[0])
    parser.add_argument("--copies", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = skewed_experts.run(options, _race)
    page.write(options, _page(options, rows, page.command("balanced_experts", arguments)))
    return 0


def _page(options: argparse.Namespace, rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# Copies of hot experts",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{skewed_experts.model(options)}; at most {options.copies} copies. Pairs of a step without "
        f"`balanced_moe_experts` and with it, A B A B, {options.repeats}; medians, the ratio with its 95 % interval.",
        "",
        "| skew | a copy pays from | copies | imbalance off, predicted | counted | on, predicted | counted | off | on "
        "| off / on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row['skew']:g} : 1",
            f"{row['break_even']:.0f} tokens",
            str(row["predicted"]["copies"]),
            *(f"{row[kind][arm]:.3f}" for arm in ARMS for kind in ("predicted", "imbalance")),
            *skewed_experts.speeds(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"*imbalance*: tokens of the fullest rank over the mean, all layers and micro-batches. {skewed_experts.SKEW}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
