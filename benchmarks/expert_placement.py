"""Experts that change places beside a router of known skew: `python -m benchmarks.expert_placement`.

    python -m benchmarks.expert_placement [--skews 4 1] [--sequence 1024] [--hidden 256] [--expert-hidden 1024]
                                          [--layers 2] [--experts 8] [--topk 2] [--micro-batches 4] [--repeats 6]
                                          [--interval 50] [--page docs/benchmarks/expert-placement.md]

Two processes, a core each, train a model whose experts they share, with `--enable-expert-placement` and without,
A B A B. The router gives the experts of the first rank a multiple of the tokens of the other rank's. Each time that the
feature is enabled, one step sees the load, experts change places after it if that pays within the interval, and the
next step is timed; then experts go home. Imbalance is tokens of the fullest rank over the mean: predicted by
`mindspeed-lite balance` from two steps that `--moe-record-load` recorded, and counted in the steps that are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks import page, skewed_experts
from benchmarks.expert_model import RANKS
from benchmarks.skewed_experts import ARMS, Race
from mindspeed_lite.parallel.balance.placer import PlacedExperts

_POLICIES = {"off": "none", "on": "placement"}


def _predicted(race: Race) -> dict[str, float]:
    """Imbalance of each arm, by the command on two recorded steps: the second one has experts at other places."""
    from mindspeed_lite import cli

    told: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    record, outcomes = Path(told[0], "load.jsonl"), Path(told[0], "outcomes.json")
    with mindspeed_lite.enabled(moe_record_load=str(record), moe_record_load_interval=1):
        for _ in range(2):
            race.training.step()
    if dist.get_rank():
        return {}
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["balance", str(record), "--interval", "1", "--json", str(outcomes)])
    if code:
        raise SystemExit(code)
    found = {each["name"]: each["by_step"][-1] for each in json.loads(outcomes.read_text())["policies"]}
    return {arm: found[policy] for arm, policy in _POLICIES.items()}


def _price(race: Race) -> float:
    """Tokens of a step that must come off the fullest rank for a slot to be exchanged, by what the feature measures."""
    from mindspeed_lite import runtime

    with mindspeed_lite.enabled(enable_expert_placement=True, expert_placement_freq=1):
        race.training.step()
        session: Any = runtime.current()
        (price,) = session.session.find("enable_expert_placement").prices.values()
    # An exchange that pays within one step, by one that pays within the interval.
    return float(price) / int(race.options.interval)


class _Exchanges:
    """Bytes and seconds of exchanges on this rank, one for each placement of all layers."""

    def __init__(self) -> None:
        self.sent, self.seconds = 0, 0.0
        self.every: list[tuple[int, float]] = []

    def timed(self, own: Any) -> Any:
        def move(places: PlacedExperts, *args: Any) -> int:
            dist.barrier(places.group)
            start = time.perf_counter()
            sent: int = own(places, *args)
            self.sent, self.seconds = self.sent + sent, self.seconds + time.perf_counter() - start
            return sent

        return mock.patch.object(PlacedExperts, "move", move)

    def end(self) -> None:
        """What came since is one exchange."""
        if self.sent:
            self.every.append((self.sent, self.seconds))
        self.sent, self.seconds = 0, 0.0

    def slowest(self) -> tuple[float, float]:
        """Median bytes and seconds over exchanges, of the rank where they take longest."""
        medians = [statistics.median(each) for each in zip(*self.every, strict=True)] if self.every else [0.0, 0.0]
        most = torch.tensor(medians, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most[0]), float(most[1])


def _race(race: Race) -> dict[str, Any]:
    predicted, price = _predicted(race), _price(race)
    on = {"enable_expert_placement": True, "expert_placement_freq": 1, "expert_placement_break_even": price}
    exchanges = _Exchanges()
    with exchanges.timed(PlacedExperts.move):
        for _ in range(race.options.repeats + 1):
            race.step("off")
            with mindspeed_lite.enabled(**on):
                race.training.step()
                exchanges.end()
                race.step("on")
            exchanges.end()
    sent, seconds = exchanges.slowest()
    return {"predicted": predicted, "price": price, "sent": sent, "exchange": seconds, **race.found()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = skewed_experts.parser("expert_placement", (__doc__ or "").split(":")[0])
    parser.add_argument("--interval", type=int, default=50, help="steps within which an exchange must pay (50)")
    options = parser.parse_args(arguments)
    if options.interval < 1:
        parser.error(f"--interval takes a number of steps, at least 1, not {options.interval}")
    rows = skewed_experts.run(options, _race)
    page.write(options, _page(options, rows, page.command("expert_placement", arguments)))
    return 0


def _page(options: argparse.Namespace, rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# Experts that change places",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{skewed_experts.model(options)}. Pairs of a step without `enable_expert_placement` and with it, A B A B, "
        f"{options.repeats}; medians, the ratio with its 95 % interval. Experts have moved before each step with it.",
        "",
        "| skew | an exchange of a slot pays from | imbalance off, predicted | counted | on, predicted | counted "
        "| an exchange sends | takes | pays after | off | on | off / on |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        saved = row["seconds"]["off"] - row["seconds"]["on"]
        moved = row["sent"] > 0
        cells = [
            f"{row['skew']:g} : 1",
            f"{row['price']:.2g} tokens",
            *(f"{row[kind][arm]:.3f}" for arm in ARMS for kind in ("predicted", "imbalance")),
            f"{row['sent'] / 1e6:.1f} MB" if moved else "nothing",
            f"{1e3 * row['exchange']:.0f} ms" if moved else "",
            f"{row['exchange'] / saved:.2g} steps" if moved and saved > 0 else "",
            *skewed_experts.speeds(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*imbalance*: tokens of the fullest rank over the mean; predicted by `mindspeed-lite balance` from two "
        f"recorded steps. {skewed_experts.SKEW} *pays from*: tokens of a step that a slot's exchange must take off "
        f"the fullest rank, if experts then stay {options.interval} steps. *sends*: one of {RANKS} ranks. *pays "
        "after*: the exchange's time over what it saves in a step. Each timed step ends with a choice of places.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
