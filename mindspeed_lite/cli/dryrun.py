"""Runs the script of COMMAND in the installed Megatron, with its features, as single ranks of the whole world: on
this machine, without a device, without storage and without a network, for one step. Says what each rank takes, and
whether all ranks call the same collectives, so that the training does not hang. COMMAND may be torchrun, python, or a
shell script that calls them: it is run with a torchrun and a python that only write down what they were to start.

Of up to 8 ranks all are run; of more, rank 0 and the other stages of its pipeline, but for stages that are like those
before and after. Data are mock data; pipelines run as few micro-batches as keep the most activations. Tokens are spread
evenly over experts, or as --expert-load says.

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
from typing import TYPE_CHECKING

from mindspeed_lite import migration, planner
from mindspeed_lite.bench.wording import flops, seconds, size
from mindspeed_lite.planner import devices, links
from mindspeed_lite.planner.published import PublishedDevice

from . import terminal, training_command
from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json

if TYPE_CHECKING:
    from mindspeed_lite.dryrun import launch, rank, timing

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")
_OUTSIDE = "outside the model"
# What saves memory of a category, besides features.
_SPREAD = ("more tensor-, pipeline- or expert-parallel ranks",)
_REMEDIES = {
    "weights": _SPREAD, "gradients": _SPREAD, "optimizer": ("--use-distributed-optimizer", *_SPREAD),
    "activations": ("a smaller micro-batch", "more tensor- or context-parallel ranks"),
}  # fmt: skip
# Places with the most activations, and modules with the most work, that are shown.
_PLACES = 8
# Places of host synchronisations that are shown.
_CALLS = 20


def add_options(parser: Parser) -> None:
    parser.reads_command = True
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    names = ", ".join(devices.FIGURES)
    option(parser, "--device NAME", f"whose memory must suffice and whose time is predicted: {names}, or a .json file")
    option(parser, "--links FILE", "with --device: what `mindspeed-lite links --json` wrote, in place of its links")
    option(parser, "--memory SIZE", "memory of a device, as 80GB (default: the device's)", training_command.memory_size)
    option(parser, "--reserve SIZE", "of it for context, communicators, temporaries, fragments (default: an estimate)",
           training_command.memory_size)  # fmt: skip
    option(parser, "--expert-load F", "tokens of the first expert over the mean of all", bounded(float, 1), 1.0)
    option(parser, "--vocabulary N", "tokens of the tokenizer, whose files are then not read", bounded(int, 2))
    option(parser, "--timeout S", "seconds for all ranks", bounded(float, 0, above=True), 600.0)
    option(parser, "--json FILE", "write everything as JSON", output_file)


def main(options: argparse.Namespace) -> int:
    from mindspeed_lite.dryrun import launch, match, rank, timing

    try:
        found = launch.find(options.command)
        measured = links.read(options.links, found.world_size) if options.links else None
        device = PublishedDevice(*devices.named(options.device), measured) if options.device else None
        memory = options.memory or (device.memory if device else None)
    except (launch.LaunchError, planner.ArgumentError) as error:
        raise CommandError(error) from None
    with terminal.progress(f"running ranks of {found.world_size}"):
        ranks = rank.run(found, options.timeout, options.vocabulary, device, options.expert_load)
    if errors := [each for each in ranks if each.error]:
        problems = match.problems({each.number: each.messages for each in ranks})
        if problems and all(each.error == rank.NO_STEP for each in errors):
            raise CommandError("\n".join(problems), 1)
        # What others wait for comes before what waits.
        first = min(errors, key=lambda each: (each.error.startswith(rank.WAITS), each.ended_at))
        failed = next(each for each in errors if each.error == first.error)
        print("\n".join(["--- the end of the log", *failed.log_tail, "---"]), file=sys.stderr)
        hint = _hint(failed.error, found)
        raise CommandError(f"rank {failed.number} of {found.world_size}: {failed.error}{hint}", 1)
    if found.unquoted:
        say(f"{', '.join(found.unquoted)}: a path with spaces needs quotes; a training ends there, a dry run reads no "
            "files")  # fmt: skip
    step = timing.predict(timing.stages_of(ranks), device) if device else None
    alike = [str(each.number) for each in ranks if each.is_alike]
    ranks = [each for each in ranks if not each.is_alike]
    problems = match.problems({each.number: each.messages for each in ranks})
    _show_memory(ranks, found.world_size)
    if alike:
        say(f"stages of ranks {', '.join(alike)} are like those before and after and were not run")
    _show_work(max(ranks, key=_total))
    _show_host(ranks[0])
    _show_messages(ranks[0])
    _show_features(ranks[0])
    if step and device:
        _show_time(step, device, found.world_size)
    if memory is None:
        say("\n--device NAME says whether it fits, and how long a step takes")
    fits = memory is None or _show_fit(ranks, memory, options, found)
    say("\n" + ("\n".join(problems) if problems else f"collectives match on the {len(ranks)} ranks that ran"))
    timed = {"step": {"step_s": step.seconds, **asdict(step)}} if step else {}
    write_json(options.json, {"world_size": found.world_size, "problems": problems,
                              "ranks": [asdict(each) for each in ranks], **timed})  # fmt: skip
    return 0 if fits and not problems else 1


def _hint(error: str, found: launch.TrainingLaunch) -> str:
    """What to change in the command, if a script's error does not say."""
    if "world_size" in error and "divisible" in error:
        return f"; the command starts {found.world_size} ranks: set its --nnodes, or the variable that its script reads"
    words = [*found.words]
    for place, word in enumerate(words):
        if f"unrecognized argument {word!r}" in error:
            flag = next((each for each in reversed(words[:place]) if each.startswith("--")), "")
            return f"; it comes after {flag}, whose value needs quotes if it has spaces" if flag else ""
    return ""


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


def _show_host(one: rank.RankResult) -> None:
    from mindspeed_lite.tuning import host_tables

    counts = Counter({(call, place): count for call, place, count in one.host["synchronizations"]})
    total, micro_batches = sum(counts.values()), one.micro_batches[0]
    say(f"\n{total} host synchronisation{'s' * (total != 1)} of rank {one.number} in a step of {micro_batches} "
        f"micro-batch{'es' * (micro_batches != 1)}, without the log")  # fmt: skip
    table(host_tables.SYNCHRONIZATION_HEADERS, host_tables.synchronization_rows(counts)[:_CALLS])
    if len(counts) > _CALLS:
        say(f"and {len(counts) - _CALLS} more places, which --json lists")
    launches: Counter[tuple[str, str]] = Counter()
    for each in one.work:
        launches[each["module"], each["pass"]] += each["launches"]
    headers, rows = host_tables.module_rows(launches, one.host["calls"], {})
    layers = [row for row in rows if ".*" in row[0]]
    table(headers, layers, "launches of a call of a module, those within included")


def _sums(one: rank.RankResult, by: str) -> list[tuple[str, str, str, str]]:
    """Rows of a table, the most operations first, then the most bytes."""
    found: dict[str, Counter[str]] = {}
    for each in one.work:
        sums = found.setdefault(each[by] or _OUTSIDE, Counter())
        sums.update({name: each[name] for name in ("flops", "bytes", "launches")})
    largest = sorted(found.items(), key=lambda each: (each[1]["flops"], each[1]["bytes"]), reverse=True)
    return [(name, flops(each["flops"]), size(each["bytes"]), f"{each['launches']:,}") for name, each in largest]


def _show_fit(
    ranks: Sequence[rank.RankResult], memory: float, options: argparse.Namespace, found: launch.TrainingLaunch
) -> bool:
    from mindspeed_lite.dryrun import reserve

    kind = devices.named(options.device)[1].kind if options.device else "cuda"
    fullest = max(ranks, key=_total)
    parts = reserve.needed(fullest, kind, found.environment, _total(fullest))
    if options.reserve is not None:
        parts = {"--reserve": options.reserve}
    needed = _total(fullest) + sum(parts.values())
    fits = needed <= memory
    named = ", ".join(f"{size(value)} for {name}" for name, value in parts.items())
    say(f"\n{'fits' if fits else 'does not fit'}: rank {fullest.number} takes {size(needed)} of {size(memory)}, "
        f"of them {named}")  # fmt: skip
    if not fits:
        most = max(_CATEGORIES, key=lambda name: int(fullest.memory[name]))
        remedies = [*_smaller(found, kind, most), *(each for each in _REMEDIES[most] if each not in found.words)]
        say(f"{size(needed - memory)} too much; {size(fullest.memory[most])} are {most}, which take less with "
            f"{', '.join(remedies[:-1])}{' or ' * (len(remedies) > 1)}{remedies[-1]}")  # fmt: skip
    return fits


def _smaller(found: launch.TrainingLaunch, kind: str, category: str) -> list[str]:
    """Flags of features that save memory of a category, by the planner's prediction, the most first."""
    words = migration.translate(found.words).accepted
    try:
        changes = [*planner.changes(planner.read(words, found.world_size, kind))]
    except planner.ArgumentError:
        return []
    saved = {each.flag: -each.difference[category] for each in changes if not each.is_on}
    return [f"{flag} ({size(saved[flag])})" for flag in sorted(saved, key=saved.__getitem__, reverse=True)
            if saved[flag] > 0]  # fmt: skip


def _show_messages(one: rank.RankResult) -> None:
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()
    elements: Counter[tuple[tuple[int, ...], str]] = Counter()
    for each in one.messages:
        if each.dtype and len(each.group) > 1:
            counts[each.group, each.kind] += 1
            elements[each.group, each.kind] += each.size * each.item_size
    names = {ranks: name for name, ranks in reversed([*one.groups.items()])}
    rows = [
        (names.get(group, "world"), str(len(group)), kind, str(number), size(elements[group, kind]))
        for (group, kind), number in sorted(counts.items(), key=lambda each: -elements[each[0]])
    ]
    if rows:
        table(("group", "ranks", "call", "calls", "bytes"), rows[:12], f"messages of rank {one.number}")


def _show_time(step: timing.PredictedStep, device: PublishedDevice, world_size: int) -> None:
    rates = ""
    if step.tokens:
        rates += f", {step.tokens / step.seconds / world_size:,.0f} tokens/s a device"
    if step.operations:
        share = step.operations / step.seconds / world_size / device.figures.flops
        rates += f", {share:.0%} of its peak (MFU, operations as Megatron counts them)"
    say(f"\na step takes {seconds(step.seconds)}{rates}; {step.exposed / step.seconds:.0%} for messages")
    rows = sorted(step.parts.items(), key=lambda each: -each[1])
    table(("time goes to", "", ""), [(name, seconds(value), f"{value / step.seconds:.0%}") for name, value in rows])
    say(f"Predicted, from operators and messages of this run on {device.name}: {device.figures.source}.")


def _show_features(one: rank.RankResult) -> None:
    on = [feature for feature, status, _ in one.features if status == "applied" and not feature.startswith("device_")]
    say(f"\nfeatures on: {', '.join(on) if on else 'none'}")
    if one.is_engine_replaced:
        say("Transformer Engine cannot be imported: Megatron's own layers run in place of its, with features for what "
            "it fuses; --transformer-impl local runs without them")  # fmt: skip
    for name in one.left_out:
        say(f"not counted: --{name.replace('_', '-')}")
    for feature, status, reasons in one.features:
        if status == "skipped":
            say(f"not counted: {feature}: {reasons}")
