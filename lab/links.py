"""Run a training on throttled links: `python -m lab.links --rate 500 -- torchrun --nproc-per-node 2 train.py ...`.

    python -m lab.links --rate MBIT [--within MBIT] [--ranks-per-host N] -- COMMAND

Each rank is a host of its own (or each N adjacent ranks), joined by links of that rate; within a host the second rate
holds. Network namespaces on Linux as root; elsewhere messages are delayed. Benchmark a training on slow links with
`mindspeed-lite bench -- python -m lab.links --rate 500 -- COMMAND`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process, terminate

# JSON of `Links` for the processes of the command; `inject/sitecustomize.py` reads it.
VARIABLE = "LAB_LINKS"
_INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Links:
    """Rates in Mbit/s (`within` None: unlimited), and the bridge of network namespaces, or "" for delays."""

    megabits: float
    within: float | None = None
    ranks_per_host: int = 1
    bridge: str = ""


def join(links: Links) -> None:
    """Let this process join the links at `init_process_group`; call it before collectives are imported by value.

    Ranks rendezvous outside, because a namespace has no route to the store; later connections use the link.
    Raises SystemExit for a training of one process.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from lab.network import Delays, Namespaces

    original = dist.init_process_group
    if not links.bridge:
        delays = Delays(ranks_per_host=links.ranks_per_host)
        delays.set_rate(links.megabits, links.within)
        delays.enter(0)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["store"] is None:
            method = given["init_method"] or "env://"
            given["init_method"] = None
            given["store"], given["rank"], given["world_size"] = next(
                iter(rendezvous(method, given["rank"], given["world_size"]))
            )
        if given["world_size"] < 2:
            raise SystemExit("lab.links joins processes, and this training has one.")
        if links.bridge:
            hosts = Namespaces(0, links.bridge, links.ranks_per_host)
            number, place = divmod(given["rank"], links.ranks_per_host)
            ready = f"lab/host/{number}"
            if place == 0:
                hosts.add(number)
                hosts.set_rate_of(number, links.megabits, links.within)
                given["store"].set(ready, "1")
            given["store"].wait([ready])
            hosts.enter(given["rank"])
        original(*call.args, **call.kwargs)

    dist.init_process_group = init_process_group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on the links; returns its exit code."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    place = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="python -m lab.links", usage="%(prog)s --rate MBIT [options] -- COMMAND")
    parser.add_argument("--rate", type=float, required=True, metavar="MBIT", help="Mbit/s that leave a host")
    parser.add_argument("--within", type=float, metavar="MBIT", help="Mbit/s within a host (default: unlimited)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="adjacent ranks that share a host")
    options, command = parser.parse_args(given[:place]), given[place + 1 :]
    if not command:
        parser.error("write the command after --")
    if not options.rate > 0 or not (options.within is None or options.within > 0) or options.ranks_per_host < 1:
        parser.error("rates are above 0, and a host has at least 1 rank")
    from lab.network import Namespaces, why_no_namespaces

    reason = why_no_namespaces()
    if reason is not None:
        print(f"links are modelled: {reason}", file=sys.stderr)
    with contextlib.nullcontext() if reason is not None else Namespaces(0) as made:
        links = Links(options.rate, options.within, options.ranks_per_host, made.name if made else "")
        paths = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, VARIABLE: json.dumps(asdict(links)), "PYTHONPATH": os.pathsep.join(paths)}
        with child_process(command, end=terminate, env={"MINDSPEED_LITE_DEVICE": "cpu", **environment}) as child:
            return child.wait()


if __name__ == "__main__":
    sys.exit(main())
