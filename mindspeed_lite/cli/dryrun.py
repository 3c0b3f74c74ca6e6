"""Runs the script of COMMAND in the installed Megatron, with its features, as single ranks of the whole world: on
this machine, without a device, without storage and without a network, for one step. Says what each rank takes, and
whether all ranks call the same collectives, so that the training does not hang. COMMAND may be torchrun, python, or a
shell script that calls them: it is run with a torchrun and a python that only write down what they were to start.

Rank 0 and one rank of each other pipeline stage are run; of up to 8 ranks, all. Data are mock data; pipelines run as
few micro-batches as keep the most activations. Tokens are spread evenly over experts.

examples:
  mindspeed-lite dryrun -- torchrun --nnodes 32 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 ...
  mindspeed-lite dryrun --memory 64 -- bash pretrain_llama3_70b.sh

exit code: 0; 1 if a rank fails, collectives do not match, or --memory is exceeded; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mindspeed_lite.bench.wording import size

from . import terminal
from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json

if TYPE_CHECKING:
    from mindspeed_lite.dryrun import rank

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")
# Places with the most activations that are shown.
_PLACES = 8


def add_options(parser: Parser) -> None:
    parser.reads_command = True
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    option(parser, "--memory GB", "memory of a device: compare the ranks with it", bounded(float, 0, above=True))
    option(parser, "--timeout S", "seconds for one rank", bounded(float, 0, above=True), 600.0)
    option(parser, "--jobs N", "ranks that run at the same time", bounded(int, 1), min(4, os.cpu_count() or 1))
    option(parser, "--json FILE", "write everything as JSON", output_file)


def main(options: argparse.Namespace) -> int:
    with terminal.progress("importing torch"):
        from mindspeed_lite.dryrun import launch, match, rank
    try:
        found = launch.find(options.command)
    except launch.LaunchError as error:
        raise CommandError(error) from None
    what = f"running ranks of {found.world_size} without storage: {' '.join(found.words[:2])} ..."
    with terminal.progress(what):
        ranks = rank.run(found, options.timeout, options.jobs)
    if failed := next((each for each in ranks if each.error), None):
        print("\n".join(["--- the end of the log", *failed.log_tail, "---"]), file=sys.stderr)
        raise CommandError(f"rank {failed.number} of {found.world_size}: {failed.error}", 1)
    problems = match.problems({each.number: each.messages for each in ranks})
    _show_memory(ranks, found.world_size)
    _show_messages(ranks[0])
    _show_features(ranks[0])
    limit = options.memory * 1e9 if options.memory else None
    most = max(ranks, key=_total)
    if limit:
        verdict = "fits" if _total(most) <= limit else "does not fit"
        taken = f"rank {most.number} takes {size(_total(most))} of {size(limit)}"
        say(f"\n{verdict}: {taken}, without context, communicators, temporary tensors and fragmentation")
    say("\n" + ("\n".join(problems) if problems else f"collectives match on the {len(ranks)} ranks that ran"))
    report = {"world_size": found.world_size, "problems": problems, "ranks": [_as_json(each) for each in ranks]}
    write_json(options.json, report)
    return 1 if problems or (limit and _total(most) > limit) else 0


def _as_json(one: rank.RankResult) -> dict[str, Any]:
    return asdict(replace(one, flags={}))


def _total(one: rank.RankResult) -> int:
    return sum(int(one.memory[each]) for each in _CATEGORIES)


def _show_memory(ranks: Sequence[rank.RankResult], world_size: int) -> None:
    run, every = ranks[0].micro_batches
    shortened = f"; {run} of {every} micro-batches were run" if run < every else ""
    rows = [
        (str(each.number), *(size(each.memory[name]) for name in _CATEGORIES), size(_total(each))) for each in ranks
    ]
    table(("rank", *_CATEGORIES, "total"), rows, f"memory of {len(ranks)} of {world_size} ranks{shortened}")
    fullest = max(ranks, key=lambda each: int(each.memory["activations"]))
    kept = [
        (
            size(each["bytes"]),
            str(each["count"]),
            f"{each['dtype']} {each['shape']}",
            each["where"][0].rpartition(":")[2],
        )
        for each in fullest.memory["kept"][:_PLACES]
    ]
    table(("bytes", "number", "each", "saved in"), kept, f"activations of rank {fullest.number} at their peak")


def _show_messages(one: rank.RankResult) -> None:
    import torch

    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    elements: Counter[tuple[tuple[int, ...], str]] = Counter()
    for each in one.messages:
        if each.dtype and len(each.group) > 1:
            counts[each.group, each.kind] += 1
            elements[each.group, each.kind] += each.size * getattr(torch, each.dtype).itemsize
    names = {ranks: name for name, ranks in reversed([*one.groups.items()])}
    rows = [
        (names.get(group, "world"), str(len(group)), kind, str(number), size(elements[group, kind]))
        for (group, kind), number in sorted(counts.items(), key=lambda each: -elements[each[0]])
    ]
    if rows:
        table(("group", "ranks", "call", "calls", "bytes"), rows[:12], f"messages of rank {one.number}")


_MISCOUNTED = {
    "virtual_optimizer": "its states in host memory are counted as on the device",
    "reuse_fp32_param": "with --use-distributed-optimizer a rank's optimizer states may be counted 13 % too high",
}


def _show_features(one: rank.RankResult) -> None:
    on = [feature for feature, status, _ in one.features if status == "applied" and not feature.startswith("device_")]
    say(f"\nfeatures on: {', '.join(on) if on else 'none'}")
    for feature in sorted({*on} & {*_MISCOUNTED}):
        say(f"{feature}: {_MISCOUNTED[feature]}")
