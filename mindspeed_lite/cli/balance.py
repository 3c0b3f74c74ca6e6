"""`mindspeed-lite balance`: what balancing experts would have gained in recorded or generated steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from mindspeed_lite.parallel.balance import record as records
from mindspeed_lite.parallel.balance.simulation import (
    BalancingOptions,
    ExpertSizes,
    GeneratedLoad,
    PolicyOutcome,
    simulate,
)

from . import generated, load_files, terminal
from .terminal import fail

PROGRAM = "mindspeed-lite balance"

DESCRIPTION = """\
Replays the loads of experts that FILE holds (what a training with --moe-record-load FILE wrote), or generated ones,
under four policies: none, copies of the hottest experts on every rank, experts at other places, and both. A policy
sees the steps before the one it is judged on."""

EPILOG = """\
examples:
  mindspeed-lite balance moe_load.jsonl
  mindspeed-lite balance moe_load.jsonl --last 200 --ranks 16 --plot balance.png
  mindspeed-lite balance moe_load.jsonl --hidden-size 2048 --moe-ffn-hidden-size 768
  mindspeed-lite balance --generate experts=128 ranks=16 topk=8 skew=4

exit code: 0; 2 for bad input."""

_LEGEND = (
    ("fullest rank", "tokens of the fullest rank over those of even load, all layers; experts take that much longer"),
    ("if known", "the same if each step's loads were known before it: the most that the policy can reach"),
    ("step", "time of a step over one without balancing"),
    (
        "known",
        "the same if loads were known: for copies that of --balanced-moe-experts, which counts first",
    ),
    ("copies", "experts copied to every rank, in a layer and step"),
    ("stayed", "share of the tokens that a copy kept on the rank that they come from"),
    ("moved", "experts that changed their rank, in a layer and placement interval (--enable-expert-placement)"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and write what is asked for; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    problem = _problem(options)
    if problem:
        return fail(PROGRAM, problem)
    policy = BalancingOptions(options.copies, options.interval, options.decay, options.break_even)
    try:
        if options.generate is None:
            record = load_files.read(options)
        else:
            load = GeneratedLoad(**generated.read(GeneratedLoad, options.generate, {"drift": 0}))
            record = load_files.last(load.record(), options)
        ranks = options.ranks or record.header.expert_parallel
        outcomes = simulate(record, ranks, policy)
    except ValueError as error:
        return fail(PROGRAM, error)
    sizes = ExpertSizes(options.hidden_size, options.moe_ffn_hidden_size) if options.hidden_size else None
    lines = _text(record, outcomes, ranks, options.experts_share, policy)
    lines += _bytes(record, outcomes, ranks, sizes, policy.interval)
    print("\n".join(lines))
    found = {"ranks": ranks, "steps": len(record.steps), "options": asdict(policy)}
    found["policies"] = [
        {**asdict(each), "imbalance": each.imbalance, "known_imbalance": each.known_imbalance} for each in outcomes
    ]
    return load_files.write(PROGRAM, options, found, lambda plots, file: plots.draw_policies(record, outcomes, file))


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if (options.file is None) == (options.generate is None):
        return "takes a FILE or --generate, one of them"
    if not 0 <= options.decay < 1:
        return f"--decay takes a weight from 0 to below 1, not {options.decay}"
    if not 0 < options.experts_share <= 1:
        return f"--experts-share takes a share above 0 and up to 1, not {options.experts_share}"
    if (options.hidden_size is None) != (options.moe_ffn_hidden_size is None):
        return "--hidden-size and --moe-ffn-hidden-size go together"
    if not 0 <= options.break_even < float("inf"):
        return f"--break-even takes a number of tokens, at least 0, not {options.break_even}"
    return load_files.problem(
        options, {"ranks": 1, "interval": 1, "copies": 0, "hidden_size": 1, "moe_ffn_hidden_size": 1}
    )


def _text(
    record: records.LoadRecord,
    outcomes: Sequence[PolicyOutcome],
    ranks: int,
    experts_share: float,
    policy: BalancingOptions,
) -> list[str]:
    header = record.header
    columns, color = terminal.width(), terminal.has_color()
    layer_steps = len(record.steps) * len(header.layers)
    placements = max(1, (len(record.steps) - 1) // policy.interval) * len(header.layers)
    sent = sum(sum(row) for each in record.steps for row in each.experts) / header.replicas
    without = 1 + experts_share * (outcomes[0].imbalance - 1)
    rows = [
        (
            each.name,
            f"{each.imbalance:.3f}",
            f"{each.known_imbalance:.3f}",
            *(
                f"{(1 + experts_share * (imbalance - 1)) / without:.3f}"
                for imbalance in (each.imbalance, each.known_imbalance)
            ),
            f"{each.copied / layer_steps:.1f}",
            f"{100 * each.stayed / sent if sent else 0:.1f} %",
            f"{each.moved / placements:.1f}",
        )
        for each in outcomes
    ]
    headers = ("policy", "fullest rank", "if known", "step", "known", "copies", "stayed", "moved")
    return [
        f"{len(record.steps)} steps, {len(header.layers)} layers: {header.experts} experts over {ranks} ranks, "
        f"{header.topk} of them for a token; experts take {100 * experts_share:.0f} % of an even step",
        "",
        *(terminal.table(headers, rows, columns, color, [0] * len(headers)) or ()),
        "",
        *terminal.labelled(_LEGEND, columns, color, indent=0),
    ]


def _bytes(
    record: records.LoadRecord,
    outcomes: Sequence[PolicyOutcome],
    ranks: int,
    sizes: ExpertSizes | None,
    interval: int,
) -> list[str]:
    """What copies move and save, by rank and step, and what a placement moves."""
    if sizes is None:
        return ["", "With --hidden-size and --moe-ffn-hidden-size: bytes that copies and placements move and save."]
    lines = [""]
    for each in outcomes:
        if each.name in ("copies", "both"):
            copied = each.copied * sizes.copy_bytes / len(record.steps)
            saved = each.stayed * sizes.token_bytes / ranks / len(record.steps)
            word = "pay in bytes too" if saved > copied else "cost more bytes than they save and pay by products alone"
            lines.append(
                f"{each.name}: a rank receives {copied / 1e6:.1f} MB of copies a step and sends {saved / 1e6:.1f} MB "
                f"less of tokens; copies {word}"
            )
        if each.name in ("placement", "both"):
            times = max(1, (len(record.steps) - 1) // interval)
            sent = each.moved * sizes.move_bytes / ranks / times
            lines.append(
                f"{each.name}: every {interval} steps a rank sends {sent / 1e6:.1f} MB of experts that move: weights "
                "in bf16 and fp32, two moments"
            )
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    default = BalancingOptions()
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="what --moe-record-load wrote")
    add("--generate", nargs="*", metavar="NAME=NUMBER",
        help="loads made up instead: experts, topk, ranks, layers, steps, tokens, skew (most popular expert over the "
        "mean), drift (change of popularity in a step), seed")  # fmt: skip
    add("--ranks", type=int, metavar="N", help="ranks that experts are spread over (default: those of the record)")
    add("--copies", type=int, default=default.copies, metavar="N", help="experts copied, at most (3)")
    add("--break-even", type=float, default=default.break_even, metavar="TOKENS",
        help="tokens of a step that a copy must take off the fullest rank to be made (0)")  # fmt: skip
    add("--interval", type=int, default=default.interval, metavar="N", help="steps between two placements (50)")
    add("--decay", type=float, default=default.decay, metavar="X", help="weight of the past in the average load (0.9)")
    add("--experts-share", type=float, default=0.5, metavar="X",
        help="share of an even step that experts take (0.5)")  # fmt: skip
    add("--hidden-size", type=int, metavar="H", help="for bytes")
    add("--moe-ffn-hidden-size", type=int, metavar="F", help="for bytes")
    load_files.add_files(parser, "the fullest rank over time under each policy", "outcomes")
    return parser
