"""Runs the script of COMMAND in the installed Megatron, with its features, as single ranks of the whole world: on
this machine, without a device, without storage and without a network, for one step. Says what each rank takes, and
whether all ranks call the same collectives, so that the training does not hang. COMMAND may be torchrun, python, or a
shell script that calls them: it is run with a torchrun and a python that only write down what they were to start.

Of up to 8 ranks all are run; of more, rank 0 and the other stages of its pipeline, but for stages that are like those
before and after. Data are mock data; pipelines run as few micro-batches as keep the most activations. Tokens are spread
evenly over experts.

examples:
  mindspeed-lite dryrun -- torchrun --nnodes 32 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 ...
  mindspeed-lite dryrun --device h100 -- bash pretrain_llama3_70b.sh

exit code: 0; 1 if a rank fails, collectives do not match or memory does not suffice; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import flops, size
from mindspeed_lite.planner import devices

from . import terminal, training_command
from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json

if TYPE_CHECKING:
    from mindspeed_lite.dryrun import rank

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")
_OUTSIDE = "outside the model"
# Places with the most activations, and modules with the most work, that are shown.
_PLACES = 8


def add_options(parser: Parser) -> None:
    parser.reads_command = True
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    option(parser, "--device NAME", f"whose memory must suffice: {', '.join(devices.FIGURES)}, or a .json file")
    option(parser, "--memory SIZE", "memory of a device, as 80GB (default: the device's)", training_command.memory_size)
    option(parser, "--reserve SIZE", "of it for context, communicators, temporaries and fragments (default: a tenth)",
           training_command.memory_size)  # fmt: skip
    option(parser, "--vocabulary N", "tokens of the tokenizer, whose files are then not read", bounded(int, 2))
    option(parser, "--timeout S", "seconds for all ranks", bounded(float, 0, above=True), 600.0)
    option(parser, "--json FILE", "write everything as JSON", output_file)


def main(options: argparse.Namespace) -> int:
    with terminal.progress("importing torch"):
        from mindspeed_lite.dryrun import launch, match, rank
    try:
        found = launch.find(options.command)
        memory = options.memory or (devices.named(options.device)[1].memory if options.device else None)
    except (launch.LaunchError, planner.ArgumentError) as error:
        raise CommandError(error) from None
    with terminal.progress(f"running ranks of {found.world_size}"):
        ranks = rank.run(found, options.timeout, options.vocabulary)
    if errors := [each for each in ranks if each.error]:
        first = min(errors, key=lambda each: each.ended_at)
        failed = next(each for each in errors if each.error == first.error)
        print("\n".join(["--- the end of the log", *failed.log_tail, "---"]), file=sys.stderr)
        raise CommandError(f"rank {failed.number} of {found.world_size}: {failed.error}", 1)
    alike = [str(each.number) for each in ranks if each.is_alike]
    ranks = [each for each in ranks if not each.is_alike]
    problems = match.problems({each.number: each.messages for each in ranks})
    _show_memory(ranks, found.world_size)
    if alike:
        say(f"stages of ranks {', '.join(alike)} are like those before and after and were not run")
    _show_work(max(ranks, key=_total))
    _show_messages(ranks[0])
    _show_features(ranks[0])
    fits = memory is None or _show_fit(ranks, memory, memory / 10 if options.reserve is None else options.reserve)
    say("\n" + ("\n".join(problems) if problems else f"collectives match on the {len(ranks)} ranks that ran"))
    report = {"world_size": found.world_size, "problems": problems, "ranks": [_as_json(each) for each in ranks]}
    write_json(options.json, report)
    return 0 if fits and not problems else 1


def _as_json(one: rank.RankResult) -> dict[str, Any]:
    return asdict(one)


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
            each["module"] or each["where"][0].rpartition(":")[2],
        )
        for each in fullest.memory["kept"][:_PLACES]
    ]
    table(("bytes", "number", "each", "saved in"), kept, f"activations of rank {fullest.number} at their peak")


def _show_work(one: rank.RankResult) -> None:
    heads = ("operations", "bytes", "launches")
    title = f"work of rank {one.number} on {one.micro_batches[0]} micro-batches"
    table(("pass", *heads), _sums(one, "pass"), title)
    table(("module", *heads), _sums(one, "module")[:_PLACES], "modules with the most of it")


def _sums(one: rank.RankResult, by: str) -> list[tuple[str, str, str, str]]:
    """Rows of a table, the most operations first, then the most bytes."""
    found: dict[str, Counter[str]] = {}
    for each in one.work:
        sums = found.setdefault(each[by] or _OUTSIDE, Counter())
        sums.update({name: each[name] for name in ("flops", "bytes", "launches")})
    largest = sorted(found.items(), key=lambda each: (each[1]["flops"], each[1]["bytes"]), reverse=True)
    return [(name, flops(each["flops"]), size(each["bytes"]), f"{each['launches']:,}") for name, each in largest]


# What holds less, by category; what is on is not said again.
_SMALLER = {
    "weights": ("reuse_fp32_param",),
    "gradients": ("grad_reduce_in_bf16",),
    "optimizer": ("reuse_fp32_param", "quant_states", "virtual_optimizer", "swap_optimizer"),
    "activations": ("use_flash_attn", "recompute_activation_function", "recompute_norm", "swap_attention",
                    "use_fused_linear_cross_entropy", "adaptive_memory"),
}  # fmt: skip


def _show_fit(ranks: Sequence[rank.RankResult], memory: float, reserve: float) -> bool:
    fullest = max(ranks, key=_total)
    fits = _total(fullest) + reserve <= memory
    taken = (
        f"rank {fullest.number} takes {size(_total(fullest))} of {size(memory)}, {size(reserve)} of which is a reserve"
    )
    say(f"\n{'fits' if fits else 'does not fit'}: {taken}")
    if not fits:
        most = max(_CATEGORIES, key=lambda name: int(fullest.memory[name]))
        on = {feature for feature, status, _ in fullest.features if status == "applied"}
        flags = [f"--{name.replace('_', '-')}" for name in _SMALLER[most] if name not in on]
        say(f"most are {most}: {', '.join(flags)}, or more ranks for a model, hold less")
    return fits


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


def _show_features(one: rank.RankResult) -> None:
    on = [feature for feature, status, _ in one.features if status == "applied" and not feature.startswith("device_")]
    say(f"\nfeatures on: {', '.join(on) if on else 'none'}")
    for feature, status, reasons in one.features:
        if status == "skipped":
            say(f"not counted: {feature}: {reasons}")
