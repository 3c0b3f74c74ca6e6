"""Experts' exchange overlapped with computation: `python -m benchmarks.expert_overlap`.

    python -m benchmarks.expert_overlap [--features moe_fb_overlap moe_alltoall_overlap_comm] [--sequence 256]
                                        [--hidden 512] [--layers 2] [--micro-batches 8] [--repeats 4]
                                        [--shares 0.5] [--where] [--page docs/benchmarks/expert-overlap.md]

Two processes, a core each, train a model whose experts they share, with a feature and without, A B A B: on a link as
fast as it goes, and on links over which a step's exchange takes shares of the computation that could hide it, and of
all computation. `moe_fb_overlap` is Megatron's combined schedule against its plain one: the first forward pass and the
last backward pass of a step have nothing beside them. `moe_alltoall_overlap_comm` is measured with a shared expert,
behind which its forward pass hides messages. A message that is longer than what runs beside it is waited for.

`--where` also prints, for each row, what rank 0 waits for: the message, its pass, and the step that asks for it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

import mindspeed_lite
from benchmarks import expert_model, expert_order, page
from benchmarks.expert_model import RANKS
from lab import expert_messages, streams
from lab.network import laboratory
from lab.ranks import Measure, Rates, compare, on_ranks, slowest
from lab.timeline import COMBINE, DISPATCH, Timeline

ARMS = ("off", "on")
COMBINED, BETWEEN = "moe_fb_overlap", "moe_alltoall_overlap_comm"
ORDERS = {COMBINED: expert_order.combined, BETWEEN: expert_order.between}
# What a share of the exchange is of, and how the page calls it.
HIDING, COMPUTING = "what could hide it", "computation"
TOPK = 2
FUSED = (
    "delay_wgrad_compute",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_flash_attn",
    "use_gradient_accumulation_fusion",
)


class Where(Timeline):
    """And `waits`: seconds of a recording by message, pass and the step that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, float] = {}

    def __enter__(self) -> Where:
        super().__enter__()
        self.waits = {}
        return self

    def _waited(self, name: str, start: float) -> None:
        super()._waited(name, start)
        if name in (DISPATCH, COMBINE):
            cause = f"{name}, {_asked_by()}"
            self.waits[cause] = self.waits.get(cause, 0.0) + self._now() - start


def _asked_by() -> str:
    """The pass, and the step of Megatron's that waits: a node of its combined schedule, or the innermost function."""
    step, direction = "", "forward"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name in ("_forward", "_backward") and owner is not None and hasattr(owner, "stream_acquire_context"):
            return f"{name[1:]}, before {owner.name}"
        if name == "_engine_run_backward":
            direction, step = "backward", "backward pass"
        if not step and "/megatron/" in frame.f_code.co_filename:
            step = name
        frame = frame.f_back
    return f"{direction}, in {step}"


def _width(options: argparse.Namespace) -> int:
    """Of an expert, and of the shared one."""
    return 2 * int(options.hidden)


def _trainings(options: argparse.Namespace, feature: str) -> dict[str, Any]:
    # Or ranks wait for the one with more tokens, which is no matter of messages.
    moe = {"moe_router_force_load_balancing": True}
    sizes: dict[str, Any] = {"ffn_hidden_size": _width(options)}
    on = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if feature == BETWEEN:
        sizes["moe_shared_expert_intermediate_size"] = _width(options)
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


def _race(trainings: dict[str, Any], feature: str, seen: Where, repeats: int) -> dict[str, Any]:
    """Compare the arms; adds the bytes that the fullest rank sends in a step, and where this rank waits."""
    sent, where = 0, {arm: dict[str, float]() for arm in ARMS}

    def run(arm: str) -> Measure:
        nonlocal sent
        trainings[arm].zero()
        with mindspeed_lite.enabled(**({feature: True} if arm == "on" else {})):
            dist.barrier()
            with seen:
                start = time.perf_counter()
                trainings[arm].forward_backward()
                seconds = time.perf_counter() - start
        sent = sum(seen.sent.values())
        for cause, waited in seen.waits.items():
            where[arm][cause] = where[arm].get(cause, 0.0) + waited / (repeats + 1)
        return Measure(seconds, seen.waited_for_experts)

    found = compare(ARMS, repeats, run)
    causes = {arm: dict(sorted(each.items(), key=lambda one: -one[1])) for arm, each in where.items()}
    return {**found, "bytes": slowest(sent), "where": causes}


def _layer(options: argparse.Namespace, feature: str, computed: float) -> expert_order.Layer:
    """A layer and micro-batch of steps that compute for so many seconds."""
    shared = _width(options) if feature == BETWEEN else 0
    counted = expert_order.layer_of(options.sequence, options.hidden, _width(options), TOPK, shared)
    return counted.scaled(computed / (options.layers * options.micro_batches))


def _measure(options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    seen = Where()
    # Below the emulated streams, which wait for messages through it.
    seen.install()
    expert_messages.install(seen)
    rows: list[dict[str, Any]] = []
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        streams.install()
        for feature in options.features:
            trainings = _trainings(options, feature)
            _race(trainings, feature, seen, 1)
            free = _race(trainings, feature, seen, options.repeats)
            computed = free["seconds"]["off"] - free["waited"]["off"]
            rows.append({"feature": feature, "computed": computed, **free})
            layer = _layer(options, feature, computed)
            hides = expert_order.could_hide(ORDERS[feature], layer, options.layers, options.micro_batches)
            for share in options.shares:
                for what, seconds in ((HIDING, hides), (COMPUTING, computed)):
                    rate, _ = rates.set(round(8e-6 * free["bytes"] / (share * seconds), 1))
                    got = _race(trainings, feature, seen, options.repeats)
                    exchange = {"share": share, "of": what, "rate": rate, "sent": share * seconds}
                    rows.append({"feature": feature, "computed": computed, **exchange, **got})
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
    parser.add_argument("--where", action="store_true", help="print what rank 0 waits for")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    body = functools.partial(_measure, options)
    with laboratory(RANKS) as (network, reason):
        rows = on_ranks(RANKS, network, body)
    text = _page(options, rows, reason, page.command("expert_overlap", arguments))
    page.write(options, text)
    if options.where:
        print("\n".join(_where(rows)))
    return 0


def _where(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        link = page.rate(row.get("rate"))
        for arm in ARMS:
            lines.append(f"{row['feature']}, {link}, {arm}: rank 0 waits")
            lines += [f"{page.ms(seconds):>9} {cause}" for cause, seconds in row["where"][arm].items()]
    return lines


_LEGEND = """\
*exchange*: time of a step's bytes on the link, over the computation that may overlap with a message, or over all. *at \
best*: off / on, and the share of the exchange that is hidden, by the feature's order of messages and products \
(`benchmarks/expert_order.py`). *waits*: of the slowest rank, for messages of experts. *hidden*: the waits that the \
feature removes, over those that it removes at best. *exposed*: the waits with the feature, over the step."""


def _page(options: argparse.Namespace, rows: list[dict[str, Any]], reason: str | None, command: str) -> str:
    kind = page.links(reason)
    lines = [
        "# Experts' exchange overlapped with computation",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"{RANKS} processes, a core each; {kind}. {options.layers} layers of {options.hidden}, 4 experts, {TOPK} a "
        f"token, {options.micro_batches} micro-batches of {options.sequence} tokens, bf16; a rank sends "
        f"{rows[0]['bytes'] / 2**20:.1f} MiB a step. Pairs of a step without the feature and with it, "
        f"A B A B, {options.repeats}; medians, the ratio with its 95 % interval.",
        "",
        "| feature | exchange | link | off | on | off / on | at best | waits off | waits on | hidden | exposed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        off, on = (row["waited"][arm] for arm in ARMS)
        exchange, link, best, hidden = "", page.rate(row.get("rate")), "", ""
        if "rate" in row:
            fastest, share = _at_best(options, row)
            exchange = f"{row['share']:g} of {row['of']}"
            best, hidden = f"{fastest:.2f}, {100 * share:.0f} %", f"{100 * (off - on) / (off * share):.0f} %"
        cells = [
            f"`{row['feature']}`",
            exchange,
            link,
            *(page.ms(row["seconds"][arm]) for arm in ARMS),
            row["ratio"],
            best,
            page.ms(off),
            page.ms(on),
            hidden,
            f"{100 * on / row['seconds']['on']:.0f} %",
        ]
        lines.append(page.row(cells))
    return "\n".join([*lines, "", _LEGEND, ""])


def _at_best(options: argparse.Namespace, row: dict[str, Any]) -> tuple[float, float]:
    """Off / on of the order in which the feature runs, and the share of the exchange that it hides."""
    each = row["sent"] / (4 * options.layers * options.micro_batches)
    layer = _layer(options, row["feature"], row["computed"])._replace(message=each)
    sizes = layer, options.layers, options.micro_batches
    off, on = expert_order.plain(*sizes), ORDERS[row["feature"]](*sizes)
    return off.now / on.now, 1 - on.exposed / off.exposed


if __name__ == "__main__":
    sys.exit(main())
