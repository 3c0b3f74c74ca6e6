"""Predicts from the arguments of COMMAND alone, without running it, the bytes that each rank takes for weights,
gradients, optimizer states and activations, and what each feature would give or take. It needs neither a device nor
as many ranks as the command is about. With --measure it also runs COMMAND for two training steps, counts the same, and
shows both.

examples:
  mindspeed-lite memory -- torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 ...
  mindspeed-lite memory --world-size 1024 --explain -- python pretrain_gpt.py --num-layers 80 --use-flash-attn ...
  mindspeed-lite memory --measure -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

exit code: 0; 1 where with --measure the run fails, or a category of a rank over 1 MB is more than 5 % from its
prediction; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import size

from . import terminal, training_command
from .terminal import CommandError, Parser, bounded, option, say, table, write_json

if TYPE_CHECKING:
    from mindspeed_lite.bench.harness import Outcome, Process
    from mindspeed_lite.bench.memory_run import Comparison


def add_options(parser: Parser) -> None:
    training_command.add_options(parser)
    option(parser, "--expert-imbalance FACTOR", "tokens of the rank whose experts get most, over an even share",
           bounded(float, 1), 1.0)  # fmt: skip
    option(parser, "--explain", "show which tensors make up the activations")
    option(parser, "--measure", "run two steps of COMMAND and show both")
    option(parser, "--timeout S", "seconds without a step after which a measured run has hung",
           bounded(float, 0, above=True), 600.0)  # fmt: skip


def main(options: argparse.Namespace) -> int:
    training = training_command.read(options, options.command).replace(expert_load=options.expert_imbalance)
    if training.expert_load > 1 and not training.num_experts:
        raise CommandError("--expert-imbalance: the command has no --num-experts: leave it out")
    ranks, compared, run = planner.ranks(training), [], None
    if options.measure:
        run = _measure(options.command, training.world_size, options.timeout)
        training = training.replace(device=options.device or _environment(run)["device_type"])
        from mindspeed_lite.bench import memory_run

        ranks = planner.ranks(training)
        compared = memory_run.compare(ranks, run.processes)
    changes = list(planner.changes(training))
    _show_prediction(training, ranks)
    if options.explain:
        rank = max(ranks, key=lambda each: each.total)
        table(
            ("part", "tensor", "number", "each", "all"),
            [(e.part, e.name, str(e.count), size(e.bytes / e.count), size(e.bytes)) for e in rank.lines],
            f"activations of rank {rank.ranks[0]} at their peak, {rank.kept} micro-batches kept",
        )
    if changes:
        _show_changes(changes)
    if run is not None:
        show_comparison(compared, run.processes)
    report = {
        "training": asdict(training),
        "stages": [_stage(rank) for rank in ranks],
        "features": [asdict(each) for each in changes],
        "measured": None if run is None else [_counted(process) for process in run.processes],
        "compared": [asdict(each) | {"deviation": each.deviation, "is_off": each.is_off} for each in compared],
    }
    write_json(options.json, report)
    return 1 if any(each.is_off for each in compared) else 0


def _environment(run: Outcome) -> dict[str, Any]:
    return dict((run.run or {})["environment"])


def _counted(process: Process) -> dict[str, Any]:
    return {"rank": process.rank, "peak": process.peak, **process.memory}


def _measure(command: Sequence[str], world_size: int, timeout: float) -> Outcome:
    if shutil.which(command[0]) is None:
        raise CommandError(f"there is no program {command[0]!r} to run")
    from mindspeed_lite.bench import memory_run

    folder = Path(tempfile.mkdtemp(prefix="mindspeed-lite-memory-"))
    print(f"two steps of the command are run and counted; log: {folder}", file=sys.stderr)
    try:
        with terminal.progress("two steps of the command") as tell:
            run = memory_run.run(command, folder, timeout, lambda steps: tell(steps, 2, "steps of the command"))
    except memory_run.MeasureError as error:
        if error.log_tail:
            print("\n".join(["--- the end of the log", *error.log_tail, "---"]), file=sys.stderr)
        raise CommandError(error, 1) from error
    shutil.rmtree(folder, ignore_errors=True)
    started = _environment(run)["world_size"]
    if started != world_size:
        raise CommandError(
            f"the command ran with {started} ranks and was predicted for {world_size}: leave out --world-size, "
            "or start as many"
        )
    return run


def _show_prediction(training: planner.TrainingConfig, ranks: Sequence[planner.Rank]) -> None:
    t = training
    parameters = sum(each.parameters.dense * t.tp + each.parameters.experts * t.ep * t.etp for each in ranks)
    layout = {"TP": t.tp, "PP": t.pp, "VPP": t.vpp, "CP": t.cp, "DP": t.dp, "EP": t.ep if t.num_experts else 1}
    say(
        f"{t.num_layers} layers of {t.hidden_size}"
        f"{f' and {t.mtp_num_layers} for further tokens' if t.mtp_num_layers else ''}, "
        f"{f'{t.num_experts} experts, ' if t.num_experts else ''}about {parameters / 1e9:.3g} billion parameters in "
        f"{'bf16' if t.bf16 else 'fp16' if t.fp16 else 'fp32'}; {t.world_size} ranks, "
        f"{' x '.join(f'{name} {number}' for name, number in layout.items() if number > 1) or 'not split'}"
        f"{', sequence parallel' if t.sequence_parallel else ''}; "
        f"{t.microbatches} micro-batches of {t.micro_batch_size} x {t.seq_length} tokens; on {t.device}"
    )
    if t.transformer_impl == "transformer_engine":
        say("Transformer Engine's layers keep other activations than Megatron's own, which are predicted here.")
    say()
    rows = []
    for _, group in groupby(ranks, key=lambda each: (each.parameters, each.states, each.lines)):
        rank, *_, end = [*group] * 2
        spans = [str(low) if low == high else f"{low}-{high}"
                 for low, high in ((rank.ranks[0], end.ranks[1]), (rank.stage, end.stage))]  # fmt: skip
        states, host = rank.states, f" + {size(rank.states.host)} on the host" if rank.states.host else ""
        rows.append(
            (*spans, str(rank.layers), f"{rank.parameters.total / 1e6:.4g} M", size(states.weights),
             size(states.gradients), size(states.main), size(states.moments) + host,
             f"{size(rank.activations)} ({rank.kept})", size(rank.total))
        )  # fmt: skip
    headers = "ranks stage layers params weights grads main moments activations total"
    table(headers.split(), rows)
    say("main: fp32 parameters; activations: (of so many micro-batches)")


def _show_changes(changes: Sequence[planner.Change]) -> None:
    rows = []
    for each in changes:
        total = each.having - each.without
        # Another rank may become the fullest, with small differences elsewhere.
        changed = {name: change for name, change in each.difference.items() if abs(change) > abs(total) / 100}
        parts = [f"{name} {_signed(change)}" if len(changed) > 1 else name for name, change in changed.items()]
        if not total:
            stage, change = max(enumerate(each.stages), key=lambda pair: abs(pair[1]))
            parts = [f"{_signed(change)} on stage {stage}"]
        state = "on" if each.is_on else "off"
        rows.append((each.flag, state, size(each.without), size(each.having), _signed(total), ", ".join(parts)))
    title = "what a feature does to the rank that takes most: the same command without it and with it"
    table(("feature", "now", "without", "with", "change", "in"), rows, title)


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '-' if change else ''}{size(abs(change))}"


def show_comparison(compared: Sequence[Comparison], processes: Sequence[Process]) -> None:
    worst: dict[tuple[int, str], Comparison] = {}
    for each in compared:
        known = worst.setdefault((each.stage, each.category), each)
        if abs(each.deviation) > abs(known.deviation):
            worst[each.stage, each.category] = each
    rows = [
        (
            str(each.stage), "in host memory" if each.category == "host" else each.category, size(each.predicted),
            # No sign for what rounds to zero.
            size(each.measured), (f"{each.deviation:+.2%}" if round(each.deviation, 4) else "0.00%")
            + (" off" if each.is_off else ""), str(each.rank),
        )
        for each in worst.values()
    ]  # fmt: skip
    title = f"predicted and measured, over {len(processes)} ranks the furthest apart"
    table(("stage", "category", "predicted", "measured", "deviation", "on rank"), rows, title)
    off = sum(each.is_off for each in compared)
    verdict = f"{off} of {len(compared)} categories over 1 MB are more than 5 % off" if off else "all within 5 %"
    say(f"\n{verdict}", "red" if off else "green")
    peak = max(processes, key=lambda each: each.peak)
    kind = (peak.run or {})["memory_kind"]
    say(f"for information: {kind}, on rank {peak.rank}: {size(peak.peak)}")


def _stage(rank: planner.Rank) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "ranks": list(rank.ranks),
        "layers": rank.layers,
        "parameters": asdict(rank.parameters) | {"total": rank.parameters.total},
        "bytes": {**rank.categories, "total": rank.total},
        "optimizer": {name: getattr(rank.states, name) for name in ("main", "moments", "host")},
        "micro_batches_kept": rank.kept,
        "activations": [asdict(line) for line in rank.lines],
    }
