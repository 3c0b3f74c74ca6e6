"""Experts' exchange behind computation: `python -m benchmarks.expert_overlap`.

    python -m benchmarks.expert_overlap [--features moe_fb_overlap moe_alltoall_overlap_comm] [--sequence 256]
                                        [--hidden 512] [--layers 2] [--micro-batches 8] [--repeats 4]
                                        [--shares 0.5] [--page docs/benchmarks/expert-overlap.md]

Two processes, a core each, train a model whose experts they share, with a feature and without, A B A B, on a link as
fast as it goes and on links over which a step's exchange takes shares of its computation. `moe_fb_overlap` is
Megatron's combined schedule against its plain one: the first forward pass and the last backward pass of a step have
nothing beside them. `moe_alltoall_overlap_comm` is measured with a shared expert, behind which its forward pass hides
messages. A message that is longer than what runs beside it is waited for.
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

import torch.distributed as dist

import mindspeed_lite
from benchmarks import expert_model, page
from benchmarks.expert_model import RANKS
from benchmarks.ranks import Rates, on_ranks
from mindspeed_lite.bench.network import Delays, Namespaces, why_no_namespaces
from mindspeed_lite.bench.statistics import paired_ratio

ARMS = ("off", "on")
COMBINED, BETWEEN = "moe_fb_overlap", "moe_alltoall_overlap_comm"
FUSED = (
    "delay_wgrad_compute",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_flash_attn",
    "use_gradient_accumulation_fusion",
)


class Exchange:
    """Times and bytes of all-to-alls, beneath the lanes."""

    def __init__(self) -> None:
        self.waited, self.sent = 0.0, 0
        original = dist.all_to_all_single

        @functools.wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            given, splits = args[1], kwargs.get("input_split_sizes")
            rows = len(given) - int(len(given) // RANKS if splits is None else splits[dist.get_rank()])
            self.sent += rows * given[:1].numel() * given.element_size()
            start = time.perf_counter()
            work = original(*args, **kwargs)
            self.waited += time.perf_counter() - start
            return None if work is None else _Timed(work, self)

        dist.all_to_all_single = exchange

    def take(self) -> tuple[float, int]:
        found = self.waited, self.sent
        self.waited, self.sent = 0.0, 0
        return found


class _Timed:
    def __init__(self, work: Any, exchange: Exchange) -> None:
        self._work, self._exchange = work, exchange

    def wait(self, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._work.wait(*args)
        finally:
            self._exchange.waited += time.perf_counter() - start


def _trainings(options: argparse.Namespace, feature: str) -> dict[str, Any]:
    # Or ranks wait for the one with more tokens, which is no matter of messages.
    moe = {"moe_router_force_load_balancing": True}
    sizes: dict[str, Any] = {"ffn_hidden_size": 2 * options.hidden}
    on = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if feature == BETWEEN:
        sizes["moe_shared_expert_intermediate_size"] = 2 * options.hidden
        on = {"moe_shared_expert_overlap": True}
    trainings = {
        arm: expert_model.training(
            options,
            4,
            moe,
            {**sizes, **(on if arm == "on" else {})},
            ddp_delay_wgrad_compute=feature == COMBINED and arm == "on",
        )
        for arm in ARMS
    }
    for training in trainings.values():
        # Gradients are reduced over the same link, once a step, and the same with both.
        training.config.finalize_model_grads_func = None
    return trainings


def _race(trainings: dict[str, Any], feature: str, exchange: Exchange, repeats: int) -> dict[str, Any]:
    """A B A B: seconds of a step, those of them that its slowest rank waits for the exchange, and bytes it sends."""
    told: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats + 1):
        for arm, training in trainings.items():
            training.zero()
            named = {feature: True} if arm == "on" else {}
            with mindspeed_lite.enabled(**named):
                dist.barrier()
                exchange.take()
                start = time.perf_counter()
                training.forward_backward()
                mine = [time.perf_counter() - start, *exchange.take()]
            if repeat:
                told[arm].append(mine)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, told)
    seconds = {
        arm: [max(r[0] for r in step) for step in zip(*(each[arm] for each in every), strict=True)] for arm in ARMS
    }
    ratio = paired_ratio(seconds["off"], seconds["on"])
    assert ratio is not None
    return {
        "seconds": {arm: statistics.median(each) for arm, each in seconds.items()},
        "waited": {arm: max(statistics.median(waited for _, waited, _ in each[arm]) for each in every) for arm in ARMS},
        "bytes": max(each["off"][0][2] for each in every),
        "ratio": [ratio.ratio, ratio.low, ratio.high],
    }


def _measure(options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    exchange = Exchange()
    rows: list[dict[str, Any]] = []
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        for feature in options.features:
            trainings = _trainings(options, feature)
            _race(trainings, feature, exchange, 1)
            free = _race(trainings, feature, exchange, options.repeats)
            rows.append({"feature": feature, "share": None, "rate": None, **free})
            for share in options.shares:
                computed = free["seconds"]["off"] - free["waited"]["off"]
                rate, _ = rates.set(round(8e-6 * free["bytes"] / (share * computed), 1))
                got = _race(trainings, feature, exchange, options.repeats)
                rows.append({"feature": feature, "share": share, "rate": rate, **got})
            rates.set(None)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_overlap", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--features", nargs="+", default=[COMBINED, BETWEEN], choices=[COMBINED, BETWEEN])
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    body = functools.partial(_measure, options)
    reason = why_no_namespaces()
    if reason is None:
        with Namespaces(RANKS) as network:
            rows = on_ranks(RANKS, network, body)
    else:
        rows = on_ranks(RANKS, Delays(), body)
    text = _page(options, rows, reason, page.command("expert_overlap", arguments))
    page.write(options, text)
    return 0


_LEGEND = """\
*waits*: of the slowest rank, in which it did not compute; without overlap that is the exchange. *hidden*: the waits \
that overlap takes away, by those that have something beside them: of all micro-batches, and of all but one in the \
combined schedule. *exposed*: the waits with overlap, by the step."""


def _page(options: argparse.Namespace, rows: list[dict[str, Any]], reason: str | None, command: str) -> str:
    kind = "network namespaces" if reason is None else f"links in the clock alone ({reason})"
    lines = [
        "# Experts' exchange behind computation",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{RANKS} processes, a core each; {kind}. {options.layers} layers of {options.hidden}, 4 experts, 2 a token, "
        f"{options.micro_batches} micro-batches of {options.sequence} tokens, bf16; a rank sends "
        f"{rows[0]['bytes'] / 2**20:.1f} MiB a step. Pairs of a step without the feature and with it, "
        f"A B A B, {options.repeats}; medians, the ratio with its 95 % interval.",
        "",
        "| feature | exchange | link | off | on | off / on | waits off | waits on | hidden | exposed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        off, on = (row["waited"][arm] for arm in ARMS)
        can_be = off * (1 - 1 / options.micro_batches) if row["feature"] == COMBINED else off
        hidden = (off - on) / can_be
        ratio, low, high = row["ratio"]
        cells = [
            f"`{row['feature']}`",
            "" if row["rate"] is None else f"{row['share']:g} of computation",
            "as fast as it goes" if row["rate"] is None else f"{row['rate']:.0f} Mbit/s",
            *(_ms(row["seconds"][arm]) for arm in ARMS),
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            _ms(off),
            _ms(on),
            f"{100 * hidden:.0f} %",
            f"{100 * on / row['seconds']['on']:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _LEGEND, ""])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
