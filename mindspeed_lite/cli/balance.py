"""Experts: FILE is what a training with --moe-record-load FILE wrote, also while it still runs. The first table is the
load of experts by layer. The second replays the steps under four policies: none, copies of the hottest experts on every
rank, experts at other places, and both. A policy sees the steps before the one it is judged on.

Sequence lengths: FILE is the .idx of a data set. Its documents are packed into sequences as training does. The table
has the attention cost of the slowest data-parallel rank: in the order that sequences come in, with
--balance-sequence-lengths, and the least that any assignment has.

--generate and --generate-lengths take drawn values in place of FILE.

examples:
  mindspeed-lite balance moe_load.jsonl --last 200 --ranks 16 --plot load.png --plot-policies policies.png
  mindspeed-lite balance moe_load.jsonl --hidden-size 2048 --moe-ffn-hidden-size 768
  mindspeed-lite balance --generate experts=128 ranks=16 topk=8 skew=4
  mindspeed-lite balance corpus_text_document.idx --seq-length 8192 --ranks 8 --global-batch-size 128
  mindspeed-lite balance --generate-lengths tail=1.4 shortest=16 --seq-length 8192 --ranks 4

exit code: 0; 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from statistics import fmean, pstdev
from typing import Any, TypeVar

from mindspeed_lite.parallel.balance import lengths, record, simulation
from mindspeed_lite.parallel.balance.lengths import GeneratedLengths
from mindspeed_lite.parallel.balance.simulation import BalancingOptions, ExpertSizes, GeneratedLoad, PolicyOutcome

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
    "if known": "the same if each step's loads were known before it: the most that the policy can reach",
    "step": "time of a step over one without balancing",
    "known": "the same if loads were known: for copies that of --balanced-moe-experts, which counts first",
    "copies": "experts copied to every rank, in a layer and step",
    "stayed": "share of the tokens that a copy kept on the rank that they come from",
    "moved": "experts that changed their rank, in a layer and placement interval (--enable-expert-placement)",
}
_BYTE_COLUMNS = {
    "policy": "",
    "copies": "bytes of copies that a rank receives in a step",
    "tokens": "bytes of tokens that a rank need not send in a step; above those of copies, copies pay in bytes too",
    "moved": "bytes of experts that a rank sends in a placement interval: weights in bf16 and fp32, two moments",
}
_LENGTH_COLUMNS = {
    "assignment": "",
    "each step": "slowest rank over that of equal ranks, where ranks wait for each other at the end of a step",
    "each micro-batch": "the same where they wait in every micro-batch: --expert-model-parallel-size above 1",
}
# Smaller exponents may draw lengths beyond a float.
_LEAST = {"drift": 0, "tail": 0.1, "seed": -math.inf}

Drawn = TypeVar("Drawn", GeneratedLoad, GeneratedLengths)


def add_options(parser: Parser) -> None:
    loads, lengths = map(parser.add_argument_group, ("loads of experts", "sequence lengths"))
    default, positive = BalancingOptions(), bounded(int, 1)
    parser.add_argument("file", metavar="FILE", nargs="?", help="what --moe-record-load wrote, or an .idx file")
    option(parser, "--ranks N", "ranks of the experts (those of the record), or data-parallel ranks (4)", positive)
    option(parser, "--json FILE", "write the tables as JSON", output_file)
    option(loads, "--generate NAME=NUMBER", "loads made up instead: experts, topk, ranks, layers, steps, tokens, skew "
           "(most popular expert over the mean), drift (change of popularity in a step), seed", nargs="+")  # fmt: skip
    option(loads, "--last N", "only the last N steps", positive)
    option(loads, "--copies N", "experts copied, at most", bounded(int, 0), default.copies)
    option(loads, "--break-even TOKENS", "tokens of a step that a copy must take off the fullest rank to be made",
           bounded(float, 0), default.break_even)  # fmt: skip
    option(loads, "--interval N", "steps between two placements", positive, default.interval)
    option(loads, "--decay X", "weight of the past in the average load, below 1",
           bounded(float, 0, math.nextafter(1, 0)), default.decay)  # fmt: skip
    option(loads, "--experts-share X", "share of an even step that experts take", bounded(float, 0, 1, above=True), 0.5)
    option(loads, "--hidden-size H", "for bytes", positive)
    option(loads, "--moe-ffn-hidden-size F", "for bytes", positive)
    option(loads, "--plot FILE", "draw the load of experts by layer and over time, as PNG", output_file)
    option(loads, "--plot-policies FILE", "draw the fullest rank over time under each policy, as PNG", output_file)
    option(lengths, "--generate-lengths NAME=NUMBER",
           "drawn documents: shortest, tail (exponent of a Pareto distribution), longest, seed", nargs="*")  # fmt: skip
    option(lengths, "--seq-length N", "tokens of a sequence", positive, 8192)
    option(lengths, "--global-batch-size N", "sequences of a step", positive, 48)
    option(lengths, "--micro-batch-size N", "sequences of a micro-batch", positive, 1)
    option(lengths, "--steps N", "steps that are simulated", positive, 50)
    option(lengths, "--seed N", "of draws and shuffles", int, 1234)
    parser.set_defaults(groups=(loads, lengths))


def main(options: argparse.Namespace) -> int:
    if sum(each is not None for each in (options.file, options.generate, options.generate_lengths)) != 1:
        raise CommandError("takes one of FILE, --generate and --generate-lengths")
    has_lengths = options.generate_lengths is not None or str(options.file).endswith(".idx")
    other = options.groups[0 if has_lengths else 1]
    for action in other._group_actions:
        if getattr(options, action.dest) != action.default:
            raise CommandError(f"{action.option_strings[0]} is about {other.title}, and there are none")
    try:
        found = _show_lengths(options) if has_lengths else _show_loads(options)
    except (ValueError, OverflowError) as error:
        raise CommandError(error) from error
    except OSError as error:
        raise CommandError(f"{options.file}: cannot be read: {error.strerror or error}") from error
    write_json(options.json, found)
    return 0


def _show_loads(options: argparse.Namespace) -> dict[str, Any]:
    drawn = options.generate
    loads = record.read(options.file) if drawn is None else _drawn(GeneratedLoad, drawn).record()
    if options.last:
        loads = loads.last(options.last)
    if (options.hidden_size is None) != (options.moe_ffn_hidden_size is None):
        raise CommandError("--hidden-size and --moe-ffn-hidden-size go together")
    policy = BalancingOptions(options.copies, options.interval, options.decay, options.break_even)
    header, balance, steps = loads.header, loads.balance(), [each.step for each in loads.steps]
    ranks = options.ranks or header.expert_parallel
    outcomes = simulation.simulate(loads, ranks, policy)
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
    intervals = max(1, (len(steps) - 1) // policy.interval)
    sent = sum(sum(row) for each in loads.steps for row in each.experts) / header.replicas or 1

    def row(each: PolicyOutcome) -> tuple[str, ...]:
        even = 1 + share * (outcomes[0].imbalance - 1)
        times = [(1 + share * (imbalance - 1)) / even for imbalance in (each.imbalance, each.known_imbalance)]
        ratios = [f"{one:.3f}" for one in (each.imbalance, each.known_imbalance, *times)]
        copied, moved = each.copied / len(steps) / len(header.layers), each.moved / intervals / len(header.layers)
        return each.name, *ratios, f"{copied:.1f}", f"{100 * each.stayed / sent:.1f} %", f"{moved:.1f}"

    _explained(_POLICY_COLUMNS, [row(each) for each in outcomes])
    say()
    if options.hidden_size is None:
        say("With --hidden-size and --moe-ffn-hidden-size: bytes that copies and placements move and save.")
    else:
        sizes = ExpertSizes(options.hidden_size, options.moe_ffn_hidden_size)
        found = [
            (each, each.copied * sizes.copy_bytes / len(steps), each.stayed * sizes.token_bytes / ranks / len(steps),
             each.moved * sizes.move_bytes / ranks / intervals)
            for each in outcomes[1:]
        ]  # fmt: skip
        _explained(_BYTE_COLUMNS, [(each.name, *(f"{one / 1e6:.1f} MB" for one in cells)) for each, *cells in found])
    for flag, file in (("--plot", options.plot), ("--plot-policies", options.plot_policies)):
        if file:
            with writing(flag, file):
                from mindspeed_lite.bench import plot_load

                plot_load.draw(loads, file) if flag == "--plot" else plot_load.draw_policies(loads, outcomes, file)
    policies = [
        {**asdict(each), "imbalance": each.imbalance, "known_imbalance": each.known_imbalance} for each in outcomes
    ]
    return {
        **asdict(header), "first_step": steps[0], "last_step": steps[-1], "steps": len(steps),
        "balance": [asdict(each) for each in balance], "ranks": ranks, "options": asdict(policy), "policies": policies,
    }  # fmt: skip


def _show_lengths(options: argparse.Namespace) -> dict[str, Any]:
    sequence, ranks, batch, seed = options.seq_length, options.ranks or 4, options.global_batch_size, options.seed
    if options.generate_lengths is None:
        documents = lengths.shuffled(lengths.read_index(options.file), seed)
    else:
        documents = _drawn(GeneratedLengths, options.generate_lengths, longest=sequence, seed=seed).draw()
    costs = lengths.sample_costs(documents, sequence, options.steps * batch, seed)
    outcomes = lengths.simulate_order(costs, ranks, batch, options.micro_batch_size)
    before, after, waiting, bound = outcomes
    say(
        f"{options.steps} steps of {batch} sequences of {sequence} tokens, "
        f"{batch // (options.micro_batch_size * ranks)} micro-batches for each of {ranks} ranks; cost of a sequence: "
        f"standard deviation / mean {pstdev(costs) / fmean(costs):.2f}\n"
    )
    _explained(_LENGTH_COLUMNS, [(each.name, f"{each.step:.4f}", f"{each.micro_batch:.4f}") for each in outcomes])
    say()
    for what, slow, fast, least in (
        ("attention of the slowest rank", before.step, after.step, bound.step),
        ("with waits in each micro-batch", before.micro_batch, waiting.micro_batch, bound.micro_batch),
    ):
        say(f"{what} {slow / fast:.2f}x faster, {100 * (fast / least - 1):.1f} % above the lower bound")
    return {"assignments": [asdict(each) for each in outcomes]}


def _explained(columns: dict[str, str], rows: Sequence[Sequence[str]]) -> None:
    table(list(columns), rows)
    say()
    table(("", ""), [(name, meaning) for name, meaning in columns.items() if meaning])


def _drawn(kind: type[Drawn], words: Sequence[str], **given: Any) -> Drawn:
    kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(kind)}
    for word in words:
        name, _, value = word.partition("=")
        try:
            given[name] = kinds[name](value)
            if not math.isfinite(given[name]):
                raise ValueError
        except (KeyError, ValueError):
            raise CommandError(f"takes NAME=NUMBER of {', '.join(kinds)}, not {word[:40]!r}") from None
        if given[name] < _LEAST.get(name, 1):
            raise CommandError(f"{word}: at least {_LEAST.get(name, 1)}")
    return kind(**given)
