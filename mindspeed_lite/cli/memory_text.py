"""How a prediction of memory is put in words and in JSON; the standard library alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mindspeed_lite.bench.wording import size
from mindspeed_lite.planner import Change, Rank, TrainingConfig

from . import terminal

if TYPE_CHECKING:
    from mindspeed_lite.bench.memory_run import Comparison, Run


def prediction(training: TrainingConfig, ranks: Sequence[Rank], width: int, color: bool) -> list[str]:
    """What is trained, and a row for every kind of rank."""
    rows = []
    for first, last, rank in _kinds(ranks):
        states, has_many = rank.states, rank.ranks[1] > rank.ranks[0] or last > first
        ends = ranks[last].ranks[1]
        rows.append(
            (
                f"{rank.ranks[0]}-{ends}" if has_many else str(rank.ranks[0]),
                f"{first}-{last}" if last > first else str(first),
                str(rank.layers),
                f"{rank.parameters.total / 1e6:.4g} M",
                size(states.weights),
                size(states.gradients),
                size(states.main),
                size(states.moments) + (f" + {size(states.host)} in host memory" if states.host else ""),
                size(rank.activations),
                str(rank.kept),
                size(rank.total),
            )
        )
    headers = (
        "ranks", "stage", "layers", "parameters", "weights", "gradients", "main", "moments", "activations", "kept",
        "total",
    )  # fmt: skip
    lines = [*_about(training, ranks, width), ""]
    return lines + _table(headers, rows, width, color, (0, 5, 6, 8, 7, 7, 7, 7, 7, 4, 7))


def explanation(training: TrainingConfig, ranks: Sequence[Rank], width: int, color: bool) -> list[str]:
    """The tensors of the rank that takes most."""
    rank = max(ranks, key=lambda each: each.total)
    rows = [
        (line.part, line.name, str(line.count), size(line.bytes / line.count), size(line.bytes)) for line in rank.lines
    ]
    title = f"activations of rank {rank.ranks[0]} at their peak, {rank.kept} micro-batches kept"
    return [
        terminal.paint(title, "bold", color),
        "",
        *_table(("part", "tensor", "number", "each", "all"), rows, width, color, (0, 20, 0, 0, 0)),
    ]


def changes(found: Sequence[Change], width: int, color: bool) -> list[str]:
    """What each feature gives or takes, on the rank that takes most."""
    rows = []
    for each in found:
        total = each.having - each.without
        # Another rank may be the fullest then, with a little more or less of everything.
        changed = {name: change for name, change in each.difference.items() if abs(change) > abs(total) / 100}
        parts = [f"{name} {_signed(change)}" if len(changed) > 1 else name for name, change in changed.items()]
        if not total:
            stage, change = max(enumerate(each.stages), key=lambda pair: abs(pair[1]))
            parts = [f"{_signed(change)} on stage {stage}"]
        rows.append(
            (
                each.flag,
                "on" if each.is_on else "off",
                size(each.without),
                size(each.having),
                _signed(total),
                ", ".join(parts),
            )
        )
    title = "what a feature does to the rank that takes most: the same command without it and with it"
    headers = ("feature", "now", "without", "with", "change", "in")
    return [terminal.paint(title, "bold", color), "", *_table(headers, rows, width, color, (20, 0, 0, 0, 0, 12))]


def comparison(found: Sequence[Comparison], run: Run, width: int, color: bool) -> list[str]:
    """Predicted beside measured: of each stage and category the rank that is furthest off."""
    worst: dict[tuple[int, str], Comparison] = {}
    for each in found:
        known = worst.get((each.stage, each.category))
        if known is None or abs(each.deviation) > abs(known.deviation):
            worst[each.stage, each.category] = each
    rows = [
        (
            str(each.stage),
            each.category if each.category != "host" else "in host memory",
            size(each.predicted),
            size(each.measured),
            _percent(each.deviation) + (" off" if each.is_off else ""),
            str(each.rank),
        )
        for each in worst.values()
    ]
    headers = ("stage", "category", "predicted", "measured", "deviation", "on rank")
    title = f"predicted and measured, over {len(run.processes)} ranks the furthest apart"
    off = sum(each.is_off for each in found)
    verdict = f"{off} of {len(found)} categories over 1 MB are more than 5 % off" if off else "all within 5 %"
    peak = max(run.processes, key=lambda each: each.peak)
    beside = f"for information: {peak.peak_kind}, on rank {peak.rank}: {size(peak.peak)}"
    return [
        terminal.paint(title, "bold", color),
        "",
        *_table(headers, rows, width, color, (0,) * 6),
        "",
        terminal.paint(verdict, "red" if off else "green", color),
        *terminal.wrap(beside, width),
    ]


def report(
    training: TrainingConfig,
    ranks: Sequence[Rank],
    found: Sequence[Change],
    compared: Sequence[Comparison],
    run: Run | None,
) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "training": asdict(training),
        "stages": [
            {
                "stage": rank.stage,
                "ranks": list(rank.ranks),
                "layers": rank.layers,
                "parameters": asdict(rank.parameters) | {"total": rank.parameters.total},
                "bytes": {**rank.categories, "total": rank.total},
                "optimizer": {name: getattr(rank.states, name) for name in ("main", "moments", "host")},
                "micro_batches_kept": rank.kept,
                "activations": [asdict(line) for line in rank.lines],
            }
            for rank in ranks
        ],
        "features": [asdict(each) | {"difference": dict(each.difference)} for each in found],
        "measured": None if run is None else [asdict(process) for process in run.processes],
        "compared": [asdict(each) | {"deviation": each.deviation, "is_off": each.is_off} for each in compared],
    }


def _about(training: TrainingConfig, ranks: Sequence[Rank], width: int) -> list[str]:
    t = training
    dense = sum(rank.parameters.dense for rank in ranks) * t.tp
    experts = sum(rank.parameters.experts for rank in ranks) * t.ep * t.etp
    kind = f"{t.num_experts} experts, " if t.num_experts else ""
    further = f" and {t.mtp_num_layers} for further tokens" if t.mtp_num_layers else ""
    dtype = "bf16" if t.bf16 else "fp16" if t.fp16 else "fp32"
    layout = {"TP": t.tp, "PP": t.pp, "VPP": t.vpp, "CP": t.cp, "DP": t.dp, "EP": t.ep if t.num_experts else 1}
    split = " x ".join(f"{name} {number}" for name, number in layout.items() if number > 1) or "not split"
    text = (
        f"{t.num_layers} layers of {t.hidden_size}{further}, {kind}"
        f"about {(dense + experts) / 1e9:.3g} billion parameters in "
        f"{dtype}; {t.world_size} ranks, {split}{', sequence parallel' if t.sequence_parallel else ''}; "
        f"{t.microbatches} micro-batches of {t.micro_batch_size} x {t.seq_length} tokens; on {t.device}"
    )
    notes = []
    if t.transformer_impl == "transformer_engine":
        notes = ["Transformer Engine's layers keep other activations than Megatron's own, which are predicted here."]
    return [*terminal.wrap(text, width), *(line for note in notes for line in terminal.wrap(note, width))]


def _kinds(ranks: Sequence[Rank]) -> Iterator[tuple[int, int, Rank]]:
    """Runs of stages that take the same: first and last stage, and a rank of them."""
    first = 0
    for place, rank in enumerate(ranks):
        if place + 1 == len(ranks) or not _are_alike(ranks[place + 1], rank):
            yield first, place, ranks[first]
            first = place + 1


def _are_alike(one: Rank, other: Rank) -> bool:
    return (one.parameters, one.states, one.lines) == (other.parameters, other.states, other.lines)


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '-' if change else ''}{size(abs(change))}"


def _percent(share: float) -> str:
    # Without the sign of what is rounded away.
    return f"{share:+.2%}" if round(share, 4) else "0.00%"


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, color: bool, minimum: Sequence[int]
) -> list[str]:
    # Where it does not fit, wider than the terminal is better than not at all.
    found = terminal.table(headers, rows, width, color, minimum) or terminal.table(headers, rows, 1000, color, minimum)
    return found or []
