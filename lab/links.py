"""Run a training on throttled links: `python -m lab.links --rate 500 -- torchrun --nproc-per-node 2 train.py ...`.

    python -m lab.links --rate MBIT [--within MBIT] [--ranks-per-host N] -- COMMAND

Each rank is a host of its own (or each N adjacent ranks), joined by links of that rate; within a host the second rate
holds. Messages are delayed by the time that they would take. Benchmark a training on slow links with
`mindspeed-lite bench -- python -m lab.links --rate 500 -- COMMAND`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process, terminate

# JSON of `join`'s arguments for the processes of the command; `inject/sitecustomize.py` reads it.
VARIABLE = "LAB_LINKS"
_INJECT = Path(__file__).parent / "inject"


def join(rate: float, within: float | None = None, ranks_per_host: int = 1) -> None:
    """Let this process join links of that many Mbit/s; call it before collectives are imported by value.

    within: Mbit/s within a host; None is unlimited. `init_process_group` raises SystemExit for a single process.
    """
    import torch.distributed as dist

    from lab.network import Delays

    delays = Delays(rate, ranks_per_host=ranks_per_host)
    delays.set_rate(rate, within)
    delays.enter()
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if dist.get_world_size() < 2:
            raise SystemExit("lab.links joins processes, and this training has one.")

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
    paths = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, VARIABLE: json.dumps(vars(options)), "PYTHONPATH": os.pathsep.join(paths)}
    with child_process(command, end=terminate, env={"MINDSPEED_LITE_DEVICE": "cpu", **environment}) as child:
        return child.wait()


if __name__ == "__main__":
    sys.exit(main())
