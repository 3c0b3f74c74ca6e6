"""Shows how balancing changes the load of experts, or the attention cost of data-parallel ranks.

Experts: FILE is what a training with --moe-record-load FILE wrote, also while it still runs. The first table is the
load of experts by layer. The second replays the steps under four policies: none, copies of the hottest experts on every
rank, experts at other places, and both. Copies see the loads of their step, as --balanced-moe-experts does, and places
those of the steps before.

Sequence lengths: FILE is the .idx of a data set. Its documents are packed into sequences as training does. The table
has the attention cost of the slowest data-parallel rank: in the order that sequences come in, and with
--balance-sequence-lengths.

examples:
  mindspeed-lite balance moe_load.jsonl --last 200 --ranks 16 --plot load.png
  mindspeed-lite balance corpus_text_document.idx --seq-length 8192 --ranks 8 --global-batch-size 128

exit code: 0; 2 for bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import Any

from mindspeed_lite.parallel.balance import lengths, record, simulation
from mindspeed_lite.parallel.balance.simulation import PolicyOutcome

from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json, writing

_LAYER_COLUMNS = {
    "layer": "",
    "experts": "max / mean of the experts' tokens: mean of the steps; 1 is even",
    "worst": "the same of the worst step",
    "variation": "standard deviation / mean of the experts' tokens, mean of the steps",
    "idle": "experts without a token in all of these steps",
    "ranks": "max / mean of the ranks' tokens, mean of the steps",
    "dropped": "share of the router's choices that capacity dropped",
}
_POLICY_COLUMNS = {
    "policy": "",
    "fullest": "tokens of the fullest rank over those of even load, all layers; experts take that much longer",
    "step": "time of a step over one without balancing",
    "copies": "experts copied to every rank, in a layer and step (--balanced-moe-experts)",
    "stayed": "share of the tokens that a copy kept on the rank that they come from",
    "moved": "experts that changed their rank, in a layer and placement interval (--enable-expert-placement)",
}
_LENGTH_COLUMNS = {
    "assignment": "",
    "each step": "slowest rank over that of equal ranks, where ranks wait for each other at the end of a step",
    "each micro-batch": "the same where they wait in every micro-batch: --expert-model-parallel-size above 1",
}


def add_options(parser: Parser) -> None:
    loads, lengths = map(parser.add_argument_group, ("loads of experts", "sequence lengths"))
    positive = bounded(int, 1)
    parser.add_argument("file", metavar="FILE", help="what --moe-record-load wrote, or an .idx file")
    option(parser, "--ranks N", "ranks of the experts (those of the record), or data-parallel ranks (4)", positive)
    option(parser, "--json FILE", "write the tables as JSON", output_file)
    option(loads, "--last N", "only the last N steps", positive)
    option(loads, "--copies N", "experts copied, at most", bounded(int, 0), 3)
    option(loads, "--break-even TOKENS", "tokens of a step that a copy must take off the fullest rank to be made",
           bounded(float, 0), 0.0)  # fmt: skip
    option(loads, "--interval N", "steps between two placements", positive, 50)
    option(loads, "--experts-share X", "share of an even step that experts take", bounded(float, 0, 1, above=True), 0.5)
    option(loads, "--plot FILE", "draw the load of experts by layer and over time, and the policies, as PNG",
           output_file)  # fmt: skip
    option(lengths, "--seq-length N", "tokens of a sequence", positive, 8192)
    option(lengths, "--global-batch-size N", "sequences of a step", positive, 48)
    option(lengths, "--micro-batch-size N", "sequences of a micro-batch", positive, 1)
    option(lengths, "--steps N", "steps that are simulated", positive, 50)
    option(lengths, "--seed N", "of shuffles", int, 1234)
    parser.set_defaults(groups=(loads, lengths))


def main(options: argparse.Namespace) -> int:
    has_lengths = options.file.endswith(".idx")
    other = options.groups[0 if has_lengths else 1]
    for action in other._group_actions:
        if getattr(options, action.dest) != action.default:
            raise CommandError(f"{action.option_strings[0]} is about {other.title}, and there are none")
    try:
        found = _show_lengths(options) if has_lengths else _show_loads(options)
    except ValueError as error:
        raise CommandError(error) from error
    except OSError as error:
        raise CommandError(f"{options.file}: cannot be read: {error.strerror or error}") from error
    write_json(options.json, found)
    return 0


def _show_loads(options: argparse.Namespace) -> dict[str, Any]:
    loads = record.read(options.file)
    if options.last:
        loads = loads.last(options.last)
    header, balance, steps = loads.header, loads.balance(), [each.step for each in loads.steps]
    ranks = options.ranks or header.expert_parallel
    policy = {"copies": options.copies, "interval": options.interval, "break_even": options.break_even}
    outcomes = simulation.simulate(loads, ranks, **policy)
    say(
        f"{len(steps)} steps, {steps[0]} to {steps[-1]}: {header.experts} experts, {header.topk} of them for a token, "
        f"over {header.expert_parallel} ranks{f', {header.replicas} times' if header.replicas > 1 else ''}\n"
    )
    layers = [
        (
            loads.label(each.layer), f"{each.imbalance:.2f}", f"{each.worst:.2f}", f"{each.variation:.2f}",
            str(each.idle), f"{each.rank_imbalance:.2f}", f"{100 * max(each.dropped, 0):.1f} %",
        )
        for each in balance
    ]  # fmt: skip
    _explained(_LAYER_COLUMNS, layers)
    share = options.experts_share
    say(f"\nbalanced over {ranks} ranks; experts take {100 * share:.0f} % of an even step\n")
    intervals = max(1, (len(steps) - 1) // options.interval)
    sent = sum(sum(row) for each in loads.steps for row in each.experts) / header.replicas or 1

    def row(each: PolicyOutcome) -> tuple[str, ...]:
        step = (1 + share * (each.imbalance - 1)) / (1 + share * (outcomes[0].imbalance - 1))
        copied, moved = each.copied / len(steps) / len(header.layers), each.moved / intervals / len(header.layers)
        stayed = f"{100 * each.stayed / sent:.1f} %"
        return each.name, f"{each.imbalance:.3f}", f"{step:.3f}", f"{copied:.1f}", stayed, f"{moved:.1f}"

    _explained(_POLICY_COLUMNS, [row(each) for each in outcomes])
    if options.plot:
        with writing("--plot", options.plot):
            from mindspeed_lite.bench import plot_load

            plot_load.draw(loads, outcomes, options.plot)
    return {
        **asdict(header), "first_step": steps[0], "last_step": steps[-1], "steps": len(steps),
        "balance": [asdict(each) for each in balance], "ranks": ranks, "options": policy,
        "policies": [asdict(each) for each in outcomes],
    }  # fmt: skip


def _show_lengths(options: argparse.Namespace) -> dict[str, Any]:
    sequence, ranks, batch, seed = options.seq_length, options.ranks or 4, options.global_batch_size, options.seed
    documents = lengths.shuffled(lengths.read_index(options.file), seed)
    costs = lengths.sample_costs(documents, sequence, options.steps * batch, seed)
    outcomes = lengths.simulate_order(costs, ranks, batch, options.micro_batch_size)
    before, after, waiting = outcomes
    say(
        f"{options.steps} steps of {batch} sequences of {sequence} tokens, "
        f"{batch // (options.micro_batch_size * ranks)} micro-batches for each of {ranks} ranks; cost of a sequence: "
        f"standard deviation / mean {pstdev(costs) / fmean(costs):.2f}\n"
    )
    _explained(_LENGTH_COLUMNS, [(each.name, f"{each.step:.4f}", f"{each.micro_batch:.4f}") for each in outcomes])
    say()
    for what, slow, fast in (
        ("attention of the slowest rank", before.step, after.step),
        ("with waits in each micro-batch", before.micro_batch, waiting.micro_batch),
    ):
        say(f"{what} {slow / fast:.2f}x faster")
    return {"assignments": [asdict(each) for each in outcomes]}


def _explained(columns: dict[str, str], rows: Sequence[Sequence[str]]) -> None:
    table(list(columns), rows)
    say()
    table(("", ""), [(name, meaning) for name, meaning in columns.items() if meaning])
