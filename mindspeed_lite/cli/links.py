"""Measures the links between the ranks of torchrun, in about a minute for 64: latency and bandwidth of pairs of ranks,
and the same matrix product on each rank. Names slow hosts, ranks, links and stragglers in computation. With a training
command also: bandwidth of its process groups, an order of ranks in which its messages take least, and flags. `plan` and
`dryrun` read the file with --links, `run` with --rank-order.

examples:
  torchrun --nnodes 8 --nproc-per-node 8 ... -m mindspeed_lite links --json links.json --plot links.png
  torchrun --nnodes 8 --nproc-per-node 8 ... -m mindspeed_lite links --json links.json -- pretrain_gpt.py ...

exit code: 0; 2 for bad input.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import rate, seconds, significant
from mindspeed_lite.planner import slow_parts, traffic
from mindspeed_lite.planner.links import Links, MeasuredGroup, Message, communication, fast_block, propose, sent
from mindspeed_lite.planner.work import CollectiveCall

from . import terminal, training_command
from .terminal import CommandError, Parser, option, output_file, say, show_command, table, write_json, writing

if TYPE_CHECKING:
    from mindspeed_lite.parallel.link_probe import LinkProbe

# Ranks of a matrix on the screen; of more, hosts.
_SHOWN = 16
_PATIENCE = timedelta(minutes=5)


def add_options(parser: Parser) -> None:
    training_command.add_command(parser)
    parser.needs_command = False
    parser.usage = "%(prog)s [options] [-- COMMAND ...]"
    option(parser, "--plot FILE", "draw the matrices as PNG", output_file)


def main(options: argparse.Namespace) -> int:
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if ranks < 2:
        raise CommandError("measures torchrun's ranks, and there is one: torchrun --nproc-per-node 8 ... -m "
                           "mindspeed_lite links")  # fmt: skip
    # One rank draws.
    with nullcontext(lambda *given: None) if rank else terminal.progress("importing torch") as tell:
        import torch
        import torch.distributed as dist

        from mindspeed_lite import platform
        from mindspeed_lite.parallel.link_probe import LinkProbe

        chosen = platform.choose()
        device = torch.device(chosen.name)
        if chosen.name != "cpu":
            getattr(torch, chosen.name).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(chosen.distributed_backend, timeout=_PATIENCE)
        try:
            probe = LinkProbe(socket.gethostname(), device)
            messages = _messages(options, probe, chosen.name) if options.command else {}
            bandwidth, latency = probe.pairs(tell)
            links = Links(probe.hosts, bandwidth, latency, probe.compute())
            links = replace(links, groups=_groups(links, messages, probe))
        finally:
            dist.destroy_process_group()
    if rank:
        return 0
    order = propose(links, messages) if messages else []
    if order:
        times = [communication(links, messages, each) for each in (range(ranks), order)]
        links = replace(links, order=order, seconds=times)
    found = slow_parts.slow_parts(links)
    _show(links, found)
    flags = _flags(links, messages)
    if order:
        _show_order(links, flags)
    write_json(options.json, {**asdict(links), "slow": [asdict(each) for each in found], "flags": flags})
    if options.plot:
        with writing("--plot", options.plot):
            from mindspeed_lite.bench import plot_links

            plot_links.draw(links, options.plot)
    return 0


def _messages(options: argparse.Namespace, probe: LinkProbe, device: str) -> dict[Message, float]:
    """Bytes of the command's step, read by rank 0, which alone says what is wrong."""
    import torch.distributed as dist

    told: list[Any] = [{}, ""]
    if probe.rank == 0:
        try:
            given = argparse.Namespace(device=device, world_size=probe.ranks, vocabulary=options.vocabulary)
            ones = [[1.0] * probe.ranks] * probe.ranks
            per_host = Links(probe.hosts, ones, ones, []).ranks_per_host
            told[0] = traffic.bytes_of_step(training_command.read(given, options.command), per_host)
        except planner.ArgumentError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told)
    if told[1]:
        raise CommandError(told[1]) if probe.rank == 0 else SystemExit(2)
    return dict(told[0])


def _groups(links: Links, messages: dict[Message, float], probe: LinkProbe) -> list[MeasuredGroup]:
    found = []
    for kind, group in messages:
        if kind != "send":
            each = sent(CollectiveCall(kind, 1.0, group))
            slowest = min(links.rates(kind, group, range(len(links.hosts))))
            speed = probe.group_rate(kind, group.size, group.stride, each, slowest)
            found.append(MeasuredGroup(kind, group.size, group.stride, speed))
    return found


def _show(links: Links, found: Sequence[slow_parts.SlowPart]) -> None:
    names = [*dict.fromkeys(links.hosts)]
    ranks = range(len(links.hosts))
    if len(ranks) <= _SHOWN:
        members = {str(rank): [rank] for rank in ranks}
    else:
        members = {name: [rank for rank in ranks if links.hosts[rank] == name] for name in names}

    def cell(matrix: Sequence[Sequence[float]], own: Sequence[int], peers: Sequence[int], scale: float) -> str:
        pairs = [matrix[i][j] for i, j in itertools.product(own, peers) if i != j]
        return significant(scale * median(pairs)) if pairs else ""

    for title, matrix, scale in (
        ("bandwidth from row to column, Gbit/s", links.bandwidth, 8e-9),
        ("latency, us", links.latency, 1e6),
    ):
        rows = [
            (name, *(cell(matrix, own, peers, scale) for peers in members.values())) for name, own in members.items()
        ]
        table(("", *members), rows, title)
    if links.groups:
        rows = [
            (each.kind, str(each.size), str(each.stride), rate(each.bytes_per_second, "B")) for each in links.groups
        ]
        table(("process groups", "ranks", "apart", "a rank of the slowest sends"), rows, "all groups of a kind at once")
    product = seconds(median(links.compute))
    say(f"\n{len(ranks)} ranks on {len(names)} host{'s' * (len(names) > 1)}; a matrix product takes {product}")
    for each in found:
        say(each.text, "bold")
    if not found:
        say("no host, rank or link is slower than others")


def _flags(links: Links, messages: dict[Message, float]) -> list[str]:
    """Values that follow from which ranks are near each other."""
    block = fast_block(links)
    experts = [group for kind, group in messages if kind == "all_to_all"]
    rings = [group for kind, group in messages if kind == "send" and not group.stages]
    found = []
    if block > 1 and any(block < group.size * group.stride for group in experts):
        found += ["--moe-node-size", str(block)]
    for ring in rings[:1]:
        if 1 < (window := math.gcd(ring.size, max(1, block // ring.stride))) < ring.size:
            found += ["--cp-window-size", str(window)]
    return found


def _show_order(links: Links, flags: Sequence[str]) -> None:
    before, after = links.seconds
    if [*links.order] == [*range(len(links.order))]:
        say(f"messages of a step take {seconds(before)}; no order of ranks is faster")
    else:
        say(f"messages of a step take {seconds(before)}, and {seconds(after)} with ranks in the order "
            f"{','.join(map(str, links.order))}: `run --rank-order FILE`, FILE being what --json wrote")  # fmt: skip
    if flags:
        say("flags for these links\n")
        show_command(flags)
