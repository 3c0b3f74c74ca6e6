"""Predicts the time of a step from what its ranks ran on a device's clock."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_lite.pipeline.costs import Costs
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.simulate import ends_of_step
from mindspeed_lite.pipeline.steps import Schedule
from mindspeed_lite.planner import orders
from mindspeed_lite.planner.devices import Figures
from mindspeed_lite.planner.links import Links, MeasuredGroup
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.work import CollectiveCall, Group

from . import prices
from .calls import PIPELINE, RECEIVES, SENDS, GroupCall
from .clock import Clock

if TYPE_CHECKING:
    from .rank import RankResult
    from .work import WorkRecorder
    from .world import World

_Parts = defaultdict[str, float]
# Passes that each micro-batch repeats.
_BACKWARD = ("backward", "recompute")
# A kind of parallelism, how Megatron's names of its groups begin, and calls that others make seldom.
_PARALLEL = (
    ("expert parallel", ("EXPERT_MODEL", "EXPERT_TENSOR_AND_MODEL"), "all_to_all"),
    ("context parallel", ("CONTEXT", "HIERARCHICAL_CONTEXT"), "all_to_all"),
    ("tensor parallel", ("TENSOR_MODEL", "EXPERT_TENSOR_PARALLEL"), ""),
    ("context parallel", ("CONTEXT",), ""),
    ("data parallel", ("DATA", "EXPERT_DATA", "INTRA_PARTIAL", "INTRA_EXPERT"), ""),
)
_OTHER = "other messages"
_COMPUTED = ("products", "experts", "attention", "vector")


def clock_of(device: Mapping[str, Any] | None) -> Clock | None:
    if device is None:
        return None
    links = device["links"]
    if links is not None:
        links = Links(**{**links, "groups": [MeasuredGroup(**each) for each in links["groups"]]})
    return Clock(PublishedDevice(device["name"], Figures(**device["figures"]), links))


def on_message(clock: Clock, recorder: WorkRecorder, world: World) -> Callable[[GroupCall], Callable[[], None]]:
    """What the world calls with each collective of a step."""

    def call(message: GroupCall) -> Callable[[], None]:
        size = max(message.size, sum(message.sent), sum(message.received)) * message.item_size
        seconds = prices.message(clock.device, message.kind, message.group, size, message.item_size)
        place, label = recorder.place()[1], _parallel(message, world.groups)
        end = clock.message(place, label, message.group, seconds, message.is_async)
        return lambda: clock.wait(recorder.place()[1], label, end)

    return call


def _parallel(message: GroupCall, groups: Mapping[str, tuple[int, ...]]) -> str:
    names = [name for name, ranks in groups.items() if ranks == message.group]
    for label, begins, kind in _PARALLEL:
        if message.kind.startswith(kind) and any(name.startswith(begins) for name in names):
            return label
    return _OTHER


def of_step(
    clock: Clock, recorder: WorkRecorder, world: World, model: Sequence[Any], args: Any, overlaps_tensors: bool
) -> dict[str, Any]:
    """Seconds by pass and what takes them, and what the schedule's time depends on.

    overlaps_tensors: Transformer Engine's `--tp-comm-overlap`, which was left out.
    """
    from mindspeed_lite.bench.probes import train_step

    before = len(world.messages)
    if overlaps := getattr(args, "overlap_param_gather", False):
        # A training's first step gathers no parameters; each later one does.
        with recorder.within("parameters"):
            for chunk in model:
                chunk.start_param_sync(force_sync=True)
    facts: dict[str, Any] = {}
    try:
        facts = train_step.model()
    except Exception as error:  # Megatron's count of a model that it does not know
        print(f"mindspeed_lite: no count of tokens and operations: {type(error).__name__}: {error}", file=sys.stderr)
    return {
        "seconds": [[*each, seconds] for each, seconds in clock.seconds.items()],
        "chunks": len(model),
        "group": getattr(args, "microbatch_group_size_per_vp_stage", None) or 0,
        "order": getattr(args, "schedules_method", None) or getattr(args, "pipeline_schedule", None) or "",
        "overlaps_experts": bool(getattr(args, "overlap_moe_expert_parallel_comm", False)),
        "overlaps_parameters": overlaps,
        "splits_products": any(getattr(args, name, False) for name in _SPLITS) or overlaps_tensors,
        "gathers": len(world.messages) - before,
        "message": _between_stages(clock.device, world),
        "tokens": facts.get("tokens_per_step", 0),
        "operations": facts.get("flops_per_step", 0.0),
    }


def _between_stages(device: PublishedDevice, world: World) -> float:
    """Seconds of the largest message between pipeline stages."""
    sent = [each for each in world.messages if each.kind in (*SENDS, *RECEIVES) and each.dtype]
    if not sent:
        return 0.0
    size = max(each.size * each.item_size for each in sent)
    return device.message(CollectiveCall("send", size, Group(2, abs(sent[0].peer - world.rank))))


@dataclass(frozen=True)
class PredictedStep:
    """Of the slowest rank.

    parts: seconds by what takes them, of the busiest stage; they add up to the step. exposed: of messages in them.
    tokens, operations: of a step; 0 if unknown.
    """

    parts: Mapping[str, float]
    exposed: float
    tokens: float
    operations: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def stages_of(ranks: Sequence[RankResult]) -> list[RankResult]:
    """A rank of each stage, in order; in place of one that did not run, the one before, which is like it."""
    found: dict[int, RankResult] = {}
    for each in sorted(ranks, key=lambda each: each.number):
        found[each.number] = found[max(found)] if each.is_alike else each
    return [found[number] for number in ranks[0].groups.get(PIPELINE, (0,))]


def predict(stages: Sequence[RankResult], device: PublishedDevice) -> PredictedStep:
    """stages: a rank of each pipeline stage, in order."""
    run, every = stages[0].micro_batches
    costs = [_Stage(each, run, device) for each in stages]
    ends = _ends(stages, costs, every)
    busiest = max(costs, key=lambda each: each.forward + each.backward)
    parts = _Parts(float, {name: seconds * every for name, seconds in busiest.repeated.items()})
    end = max(own + each.gradients for own, each in zip(ends, costs, strict=True))
    parts["gradients"] = busiest.gradients
    parts["pipeline"] = max(0.0, end - sum(parts.values()))
    parts["optimizer"] = max(each.optimizer for each in costs)
    parts["parameters"] = max(each.parameters for each in costs)
    parts["host"] += device.figures.step
    exposed = sum(parts[name] for name in (_OTHER, *_EXPOSED, *{each[0] for each in _PARALLEL}))
    facts = stages[0].time
    return PredictedStep(
        {name: value for name, value in parts.items() if value > 0}, exposed,
        facts["tokens"] * every / run, facts["operations"] * every / run,
    )  # fmt: skip


_EXPOSED = ("gradients", "parameters")
# Features that split messages of tensor-parallel layers between their products.
_SPLITS = ("use_ascend_coc", "use_ascend_mc2", "tp_comm_overlap")


class _Stage:
    """Seconds of a stage: of a micro-batch, and once in a step."""

    def __init__(self, rank: RankResult, run: int, device: PublishedDevice) -> None:
        passes: dict[str, float] = {}
        self.repeated = _Parts(float)
        by_pass: dict[str, _Parts] = {}
        for during, name, seconds in rank.time["seconds"]:
            by_pass.setdefault(during, _Parts(float))[name] += seconds
        for during, parts in by_pass.items():
            if during in ("forward", *_BACKWARD):
                _overlap(parts, rank.time, device.figures.overlap)
                for name, seconds in parts.items():
                    self.repeated[name] += seconds / run
            passes[during] = sum(parts.values())
        self.forward = passes.get("forward", 0.0) / run
        self.backward = sum(passes.get(each, 0.0) for each in _BACKWARD) / run
        self.gradients, self.optimizer = passes.get("gradients", 0.0), passes.get("optimizer", 0.0)
        self.optimizer += passes.get("preparation", 0.0)
        self.parameters = passes.get("parameters", 0.0)
        if rank.time["overlaps_parameters"] and (count := rank.time["gathers"]):
            # The first bucket overlaps with nothing.
            self.parameters *= 1 - device.figures.overlap * (1 - 1 / count)


def _overlap(parts: _Parts, facts: Mapping[str, Any], overlap: float) -> None:
    """Take off a pass what overlaps where a dry run's CPU overlaps nothing; first and last parts are exposed."""
    for label, is_split, most, names in (
        ("expert parallel", facts["overlaps_experts"], 0.9, _COMPUTED),
        ("tensor parallel", facts["splits_products"], 0.75, _COMPUTED[:2]),
    ):
        if is_split:
            parts[label] -= min(parts[label] * most * overlap, sum(parts[name] for name in names))


def _ends(stages: Sequence[RankResult], costs: Sequence[_Stage], every: int) -> list[float]:
    """Seconds at which each stage ends its last micro-batch."""
    count = len(stages)
    if count == 1:
        return [(costs[0].forward + costs[0].backward) * every]
    facts = stages[0].time
    unit, chunks = max(facts["group"], count), facts["chunks"]
    name = facts["order"] or ("interleaved" if chunks > 1 else "1f1b")

    def schedule(batches: int) -> Schedule:
        shape = PipelineShape(count, batches, chunks, min(unit, batches))
        return orders.built(name, shape, facts["overlaps_experts"])

    where = schedule(unit).placement
    held = [costs[rank] for _, rank in sorted((stage, rank) for rank, row in enumerate(where) for stage in row)]
    forward, backward = [each.forward / chunks for each in held], [each.backward / chunks for each in held]
    priced = Costs(forward, backward, [0.0] * len(held), message=facts["message"])
    return ends_of_step(schedule, priced, every, unit)
