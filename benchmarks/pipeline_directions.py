"""A group for each direction of a pipeline's messages, on a slow link: `python -m benchmarks.pipeline_directions`.

    python -m benchmarks.pipeline_directions [--orders 1f1b zb-h1 ...] [--ranks 4] [--layer 10] [--message 5]
                                             [--rounds 5] [--page docs/benchmarks/pipeline-directions.md]

Processes train a model in each order, with `--optimize-send-recv-comm` and without it in turns. A layer sleeps
`--layer` milliseconds in its forward pass and twice as long in its backward pass. The link between two processes is as
fast as makes a message take `--message` milliseconds. Beside the measured times of a step stand simulated ones, in
which messages of both directions go one after the other without the flag.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mindspeed_lite
from benchmarks import page
from benchmarks.pipeline_prediction import ORDERS, delays_weight_gradients, planned_schedule, slow_layers
from lab.network import laboratory
from lab.ranks import Rates, on_ranks
from mindspeed_lite.pipeline import costs
from mindspeed_lite.pipeline.simulate import simulate

HIDDEN = 512


def _seconds(training: Any) -> float:
    training.zero()
    dist.barrier()
    begin = time.perf_counter()
    training.forward_backward()
    dist.barrier()
    return time.perf_counter() - begin


def _measured(options: argparse.Namespace, order: str, rates: Rates) -> dict[str, list[float]]:
    """Seconds of a training step, off and on in turns."""
    from megatron.core import parallel_state

    from tests.harness import core_loop

    chunks, flags, configuration = ORDERS[order]
    message = core_loop.SEQUENCE * core_loop.MICRO_BATCH * HIDDEN * 2
    found: dict[str, list[float]] = {"off": [], "on": []}
    given = {
        "pp": options.ranks,
        "layers": 2 * options.ranks,
        "micro_batches": options.micro_batches,
        "wgrad_fusion": delays_weight_gradients(flags),
        "config": {"hidden_size": HIDDEN, "num_attention_heads": 4, **configuration},
        **({"vpp": chunks} if chunks > 1 else {}),
    }
    rates.set(None)
    with mindspeed_lite.enabled(**flags, strict=True):
        training = core_loop.Training(given)
        with slow_layers(training, options.layer / 1000, delays_weight_gradients(flags)):
            for round_ in range(options.rounds + 1):
                for name in ("off", "on") if round_ % 2 else ("on", "off"):
                    more = {"optimize_send_recv_comm": True} if name == "on" else {}
                    with mindspeed_lite.enabled(**flags, **more, strict=True):
                        rates.set(None)
                        _seconds(training)  # connections are made
                        rates.set(message * 8 / (options.message * 1e3))
                        found[name].append(_seconds(training))
    rates.set(None)
    parallel_state.destroy_model_parallel()
    return {name: seconds[1:] for name, seconds in found.items()}


def _simulated(options: argparse.Namespace, order: str) -> dict[str, float]:
    chunks, flags, _ = ORDERS[order]
    schedule = planned_schedule(flags, options.ranks, chunks, options.micro_batches).one_by_one()
    layer = 2 / chunks * options.layer / 1000
    alike = costs.uniform(schedule.num_stages, layer, layer, layer, message=options.message / 1000)
    return {
        "off": simulate(schedule, replace(alike, one_queue=True)).makespan,
        "on": simulate(schedule, alike).makespan,
    }


def _measure(options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    return [
        {"order": order, "measured": _measured(options, order, rates), "simulated": _simulated(options, order)}
        for order in options.orders
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_directions", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--orders", nargs="+", default=["1f1b", "interleaved", "zb-h1", "dualpipev"], choices=[*ORDERS])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layer", type=float, default=10.0, metavar="MS")
    parser.add_argument("--message", type=float, default=5.0, metavar="MS")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    with laboratory(options.ranks) as (network, modelled):
        rows = on_ranks(options.ranks, network, functools.partial(_measure, options))
    page.write(options, _page(options, rows, modelled, page.command("pipeline_directions", arguments)))
    return 0


def _page(options: argparse.Namespace, rows: Sequence[dict[str, Any]], modelled: str | None, command: str) -> str:
    lines = [
        "# A group for each direction of a pipeline's messages",
        "",
        f"`{command}`",
        "",
        f"{page.machine()} {options.ranks} processes, {page.links(modelled)}; a message of a micro-batch takes "
        f"{options.message:g} ms. {2 * options.ranks} layers, {options.micro_batches} micro-batches; a layer sleeps "
        f"{options.layer:g} ms forward and twice as long backward. Median of {options.rounds} steps each, in turns.",
        "",
        "| order | one group, ms | two groups, ms | gain (least to most) | simulated, ms | simulated gain |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        off, on = (row["measured"][name] for name in ("off", "on"))
        gains = sorted(a / b for a, b in zip(off, on, strict=True))
        medians = [f"{statistics.median(each) * 1e3:.0f}" for each in (off, on)]
        simulated = [row["simulated"][name] for name in ("off", "on")]
        cells = (
            f"`{row['order']}`",
            *medians,
            f"{statistics.median(gains):.2f}x ({gains[0]:.2f} to {gains[-1]:.2f})",
            " to ".join(f"{each * 1e3:.0f}" for each in simulated),
            f"{simulated[0] / simulated[1]:.2f}x",
        )
        lines.append(page.row(cells))
    lines += [
        "",
        "*simulated*: with one group the messages of both directions between two ranks go one after the other, in the "
        "order in which the ranks issue them, as a communicator of NCCL or HCCL runs them. Over TCP, which gloo uses, "
        "the two directions share nothing but the requests to send.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
