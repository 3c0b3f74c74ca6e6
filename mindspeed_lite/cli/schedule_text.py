"""How pipeline schedules are put in words, in a table and in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import percent, significant, size
from mindspeed_lite.bench.wording import seconds as in_seconds
from mindspeed_lite.pipeline import costs, draw, trace
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import steps_of

from . import terminal
from .schedule_candidates import Candidate, best


def report(
    training: planner.TrainingConfig,
    found: Sequence[Candidate],
    refused: Mapping[str, str],
    limit: float | None,
    has_seconds: bool,
) -> list[str]:
    """The command's schedule drawn, its ranks, and where there are several orders all of them side by side."""
    width, color = terminal.width(), terminal.has_color()
    own = found[0]
    chunks = own.simulation.schedule.num_chunks
    head = (
        f"{own.name}: {_counted(training.pp, 'pipeline rank')}, {_counted(chunks, 'model chunk')} each, "
        f"{_counted(training.microbatches, 'micro-batch', 'es')}"
    )
    lines = [terminal.paint(head, "bold", color), "", *draw.text(own.simulation, width, color), ""]
    lines += _ranks(own, width, color)
    if not has_seconds:
        note = (
            "Times are relative: 1 is the forward pass of a micro-batch on an average rank, from counted operations "
            "without any communication. --times F,B,W takes measured milliseconds."
        )
        lines += ["", *terminal.wrap(note, width)]
    if len(found) > 1:
        lines += ["", *_orders(found, limit, has_seconds, width, color)]
    for name, reason in refused.items():
        lines += terminal.wrap(f"{name} does not apply: {reason}", width)
    if any(each.name == "zb-auto" for each in found[1:]):
        note = "Pass what `chunks live` says of zb-auto with --pipeline-schedule-max-live to run it within that."
        lines += terminal.wrap(note, width)
    fastest = best(found)
    under = f" within {limit:g} GiB" if limit is not None else ""
    if fastest is None:
        lines += ["", f"no order fits{under}: the least is {size(min(each.peak_bytes for each in found))}"]
    elif len(found) > 1:
        lines += ["", terminal.paint(f"fastest{under}: {fastest.name}", "green", color)]
    return lines


def title(candidate: Candidate, has_seconds: bool) -> str:
    """The line above a picture."""
    simulation = candidate.simulation
    return (
        f"{candidate.name}: step {_time(simulation.makespan, has_seconds)}, idle {percent(simulation.bubble)}, "
        f"at most {candidate.peak_live} chunk activations, {size(candidate.peak_bytes)}"
    )


def compared_with_trace(candidate: Candidate, executed: Sequence[trace.ExecutedStep]) -> list[str]:
    """What the last recorded training step took, beside simulations whose steps take as long as they did."""
    schedule = trace.as_executed(candidate.simulation.schedule, executed)
    besides = trace.overheads([executed], schedule)
    alone, whole = (simulate(schedule, trace.recorded_costs(executed, *more)) for more in ((), (besides,)))
    return [
        f"executed in this order, last training step: {in_seconds(trace.makespan(executed))}, idle "
        f"{percent(trace.bubble(executed))}; simulated with the times of its steps: {in_seconds(alone.makespan)}, idle "
        f"{percent(alone.bubble)}; with those of its messages ({in_seconds(besides.message)}) and of what is between "
        f"steps as well: {in_seconds(whole.makespan)}, idle {percent(whole.bubble)}"
    ]


def as_json(
    training: planner.TrainingConfig,
    found: Sequence[Candidate],
    refused: Mapping[str, str],
    limit: float | None,
    has_seconds: bool,
    has_steps: bool,
) -> dict[str, Any]:
    """Everything, for a file."""
    fastest = best(found)
    return {
        "pipeline_ranks": training.pp,
        "microbatches": training.microbatches,
        "unit": "s" if has_seconds else "forward passes of a micro-batch on an average rank",
        "memory_limit_gib": limit,
        "fastest": fastest.name if fastest else None,
        "orders": [_order_as_json(each, has_steps) for each in found],
        "not_applicable": dict(refused),
    }


def _order_as_json(candidate: Candidate, has_steps: bool) -> dict[str, Any]:
    simulation = candidate.simulation
    schedule = simulation.schedule
    ranks = []
    for rank, timed in enumerate(simulation.ranks):
        ranks.append(
            {
                "stages": list(schedule.placement[rank]),
                "idle": simulation.idle(rank),
                "exposed": simulation.exposed(rank),
                "peak_live": costs.peak_live(schedule, rank),
                "constant_bytes": candidate.constant_bytes[rank],
                "activation_bytes": candidate.activation_bytes[rank],
            }
        )
        if has_steps:
            ranks[-1]["entries"] = [
                {"steps": list(map(str, steps_of(each.entry))), "begin": each.begin, "end": each.end} for each in timed
            ]
    return {
        "name": candidate.name,
        "chunks": schedule.num_chunks,
        "step": simulation.makespan,
        "bubble": simulation.bubble,
        "exposed": simulation.exposed_share,
        "peak_bytes": candidate.peak_bytes,
        "fits": candidate.fits,
        "ranks": ranks,
    }


def _ranks(candidate: Candidate, width: int, color: bool) -> list[str]:
    simulation = candidate.simulation
    schedule, rows = simulation.schedule, []
    for rank in range(schedule.num_ranks):
        constant, kept = candidate.constant_bytes[rank], candidate.activation_bytes[rank]
        rows.append(
            (
                str(rank),
                " ".join(map(str, schedule.placement[rank])),
                percent(simulation.idle(rank) / simulation.makespan),
                percent(simulation.exposed(rank) / simulation.makespan),
                str(costs.peak_live(schedule, rank)),
                size(constant),
                size(kept),
                size(constant + kept),
            )
        )
    headers = ("rank", "stages", "idle", "of it messages", "chunks live", "states", "activations", "total")
    return _table(headers, rows, width, color)


def _orders(found: Sequence[Candidate], limit: float | None, has_seconds: bool, width: int, color: bool) -> list[str]:
    rows = []
    for each in found:
        simulation = each.simulation
        row = (
            each.name,
            str(simulation.schedule.num_chunks),
            _time(simulation.makespan, has_seconds),
            percent(simulation.bubble),
            percent(simulation.exposed_share),
            str(each.peak_live),
            size(each.peak_bytes),
        )
        rows.append((*row, "yes" if each.fits else "no") if limit is not None else row)
    headers = ("order", "chunks", "step", "idle", "of it messages", "chunks live", "peak memory")
    return _table((*headers, "fits") if limit is not None else headers, rows, width, color)


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _time(value: float, has_seconds: bool) -> str:
    return in_seconds(value) if has_seconds else significant(value, 4)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, color: bool) -> list[str]:
    return terminal.table(headers, rows, max(width, 200), color, [0] * len(headers)) or []
