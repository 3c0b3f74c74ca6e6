"""Predicts step time: simulated schedule, then gradients, optimizer and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mindspeed_lite.pipeline.costs import Costs
from mindspeed_lite.pipeline.simulate import ends_of_step

from . import layer_work, layers, optimizer, orders, parameters, seconds
from .gradients import compressed_reduction, exact_reduction
from .layers import Chunk
from .parameters import Parameters
from .seconds import Parts, PassSeconds
from .training import TrainingConfig
from .work import CollectiveCall, DeviceCosts, Group

# Gradient bucket in elements, Megatron's default; the last one overlaps with nothing.
BUCKET = 40_000_000
# Tokens of the fullest rank's experts over the mean, with a router that balances; fits published trainings.
IMBALANCE = 1.03


@dataclass(frozen=True)
class StepTime:
    """Step of the slowest rank.

    Attributes:
        parts: seconds by category, of the busiest rank; they sum to the total.
    """

    parts: Parts

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Pricer:
    """Prices trainings on one device; caches shared work."""

    def __init__(self, device: DeviceCosts, overlap: float = 1.0) -> None:
        self.device, self.overlap = device, overlap
        self._priced: dict[object, PassSeconds] = {}
        self._busy: dict[object, float] = {}

    def chunk(self, training: TrainingConfig, chunk: Chunk, number: int) -> PassSeconds:
        """One micro-batch in a chunk; `number`: index on its rank."""
        device = self.device
        found = PassSeconds({"host": device.pass_overhead(False)}, {"host": device.pass_overhead(True)})
        for each in layers.counts_in(training, chunk.layers, number):
            found += self._layer(training, each, number) * each.count
        if chunk.embeds:
            found += self._part(training, "embedding")
        if chunk.further:
            one = self._part(training, "further")
            for _ in range(chunk.further):
                found += one
        if chunk.computes_loss:
            found += self._part(training, "output")
        return found

    def busy(self, training: TrainingConfig, chunk: Chunk, number: int) -> float:
        """Seconds of a micro-batch in a chunk."""
        inside = layers.counts_in(training, chunk.layers, number)
        full = (self._key(training), inside, chunk.embeds, chunk.further, chunk.computes_loss)
        if full not in self._busy:
            self._busy[full] = sum(self.chunk(training, chunk, number).all.values())
        return self._busy[full]

    def _layer(self, training: TrainingConfig, held: layers.KindCount, number: int) -> PassSeconds:
        full = (self._key(training), "layer", held.kind)
        if full not in self._priced:
            again = layer_work.recomputed(training, held.kind.has_experts, held.layer, held.place, number)
            work = layer_work.layer(training, held.kind.has_experts, held.layer)
            self._priced[full] = seconds.price(work, again, self.device, training.width, self.overlap)
        return self._priced[full]

    def _part(self, training: TrainingConfig, name: str) -> PassSeconds:
        full = (self._key(training), name)
        if full not in self._priced:
            make = {
                "embedding": layer_work.embedding, "output": layer_work.output, "further": layer_work.further,
            }[name]  # fmt: skip
            again = layer_work.PartWork()
            if name == "further" and training.recompute_granularity == "full":
                last = training.num_layers - 1
                again = layer_work.layer(training, training.is_moe(last), last)
            self._priced[full] = seconds.price(make(training), again, self.device, training.width, self.overlap)
        return self._priced[full]

    @staticmethod
    def _key(training: TrainingConfig) -> tuple[object, ...]:
        return (
            training.tp, training.sequence_parallel, training.cp, training.context_parallel_algo,
            training.ulysses_degree_in_cp, training.ep, training.etp, training.micro_batch_size,
            training.recompute_granularity, training.recompute_modules, training.recompute_norm,
            training.recompute_activation_function, training.expert_load, training.moe_zero_memory,
        )  # fmt: skip


def step(training: TrainingConfig, pricer: Pricer) -> StepTime:
    """Raises ArgumentError for an invalid layout or schedule."""
    ranks = orders.chunks_of_ranks(training)
    priced = [[pricer.chunk(training, chunk, number) for number, chunk in enumerate(row)] for row in ranks]
    held = [parameters.of_stage(training, row) for row in ranks]
    device, count = pricer.device, training.microbatches
    run = _simulated(training, priced, pricer)
    ends: list[tuple[float, float]] = []
    for rank, params in enumerate(held):
        reduced = _reduced(training, params, device)
        hidden = min(reduced, _window(training, priced[rank]) * pricer.overlap * 0.9)
        kept = reduced - (hidden if training.overlap_grad_reduce else 0.0)
        if training.overlap_grad_reduce:
            buckets = max(1.0, params.total / max(BUCKET, 1_000_000 * training.dp * training.cp))
            kept = max(kept, reduced / buckets) if reduced else 0.0
        ends.append((run.ends[rank] + kept, kept))
    end, kept = max(ends)
    rank = max(range(len(ranks)), key=lambda each: sum(sum(one.all.values()) for one in priced[each]))
    parts = seconds.scaled(seconds.add(*(each.all for each in priced[rank])), count)
    busy = sum(parts.values())
    if training.overlap_moe_expert_parallel_comm and training.ep > 1:
        # A step's first forward and last backward are exposed.
        alone = seconds.add(*(_alone(training, row, pricer) for row in [ranks[rank]]))
        parts = seconds.add(parts, alone)
        end += sum(alone.values())
        busy += sum(alone.values())
    parts["pipeline"] = max(0.0, end - kept - busy)
    parts["gradients"] = kept
    parts["optimizer"] = max(_optimizer(training, each, device) for each in held)
    parts["parameters"] = max(_gathered(training, each, device, pricer.overlap) for each in held)
    parts["host"] = parts.get("host", 0.0) + device.step_overhead()
    total = sum(parts.values())
    everything = total * training.world_size - sum(run.idle) * training.world_size / training.pp
    shared = device.shared(everything, total, training.world_size)
    if shared > total:
        parts["shared cores"] = shared - total
    return StepTime({name: value for name, value in parts.items() if value > 0})


def lower_bound(training: TrainingConfig, pricer: Pricer, held: Sequence[Parameters]) -> float:
    """Without waits of the busiest rank; or of the last, between others' first forward and last backward.

    held: parameters of each stage.
    """
    ranks = orders.chunks_of_ranks(training)
    busy = [sum(pricer.busy(training, chunk, number) for number, chunk in enumerate(row)) for row in ranks]
    most = max(busy) * training.microbatches
    if orders.fills_and_drains(training):
        ends = sum(pricer.busy(training, row[0], 0) for row in ranks[:-1])
        most = max(most, busy[-1] * training.microbatches + ends)
    tail = max(_optimizer(training, each, pricer.device) for each in held)
    return most + tail + pricer.device.step_overhead()


@dataclass(frozen=True)
class _Run:
    ends: Sequence[float]
    idle: Sequence[float]


def _simulated(training: TrainingConfig, priced: Sequence[Sequence[PassSeconds]], pricer: Pricer) -> _Run:
    """Simulated steps; many micro-batches are extrapolated from fewer."""
    pp, count = training.pp, training.microbatches
    busy = [sum(sum(each.all.values()) for each in row) for row in priced]
    if pp == 1:
        return _Run([busy[0] * count], [0.0])
    unit = max(training.microbatch_group_size_per_vp_stage or pp, pp)
    found = ends_of_step(partial(orders.schedule, training), _costs(training, priced, pricer), count, unit)
    ends = [max(end, each * count) for end, each in zip(found, busy, strict=True)]
    return _Run(ends, [max(ends) - each * count for each in busy])


def _costs(training: TrainingConfig, priced: Sequence[Sequence[PassSeconds]], pricer: Pricer) -> Costs:
    where = orders.placement(training)
    by_stage = {stage: priced[rank][chunk] for rank, row in enumerate(where) for chunk, stage in enumerate(row)}
    held = [by_stage[stage] for stage in range(len(by_stage))]
    rows = training.seq_length / training.cp * training.micro_batch_size
    size = rows * training.hidden_size * training.width / (training.tp if training.sequence_parallel else 1)
    message = CollectiveCall("send", size, Group(2, training.world_size // training.pp, training.pp))
    return Costs(
        forward=[sum(each.forward.values()) for each in held],
        input_grad=[sum(each.input_grad.values()) for each in held],
        weight_grad=[sum(each.weight_grad.values()) for each in held],
        recompute=[sum(each.recompute.values()) for each in held],
        message=pricer.device.message(message),
        recomputes=True,
    )


def _alone(training: TrainingConfig, row: Sequence[Chunk], pricer: Pricer) -> dict[str, float]:
    """Expert exchange seconds exposed without another micro-batch."""
    bare = training.replace(overlap_moe_expert_parallel_comm=False)
    plain = Pricer(pricer.device, pricer.overlap)
    name = "expert parallel"
    exposed = sum(plain.chunk(bare, chunk, number).all.get(name, 0.0) for number, chunk in enumerate(row))
    hidden = sum(pricer.chunk(training, chunk, number).all.get(name, 0.0) for number, chunk in enumerate(row))
    return {name: max(0.0, exposed - hidden)}


def _window(training: TrainingConfig, row: Sequence[PassSeconds]) -> float:
    """Seconds of the last backward, which overlaps with gradient reduction."""
    return sum(sum(each.input_grad.values()) + sum(each.weight_grad.values()) for each in row)


def _groups(training: TrainingConfig, params: Parameters) -> list[tuple[float, Group]]:
    """Parameters and their replica group: dense, then experts."""
    dense = Group(training.dp * training.cp, training.tp)
    experts = Group(training.edp, training.ep * training.etp)
    return [(params.dense, dense), (params.experts, experts)]


def _reduced(training: TrainingConfig, params: Parameters, device: DeviceCosts) -> float:
    reduction = compressed_reduction if training.grad_reduce_compression else exact_reduction
    return sum(
        reduction(training, count, group, device)
        for count, group in _groups(training, params)
        if count and group.size > 1
    )


def _gathered(training: TrainingConfig, params: Parameters, device: DeviceCosts, overlap: float) -> float:
    """All-gather seconds; all but the first bucket overlaps with the first forward."""
    if not training.use_distributed_optimizer:
        return 0.0
    whole = sum(
        device.message(CollectiveCall("all_gather", count * training.width, group))
        for count, group in _groups(training, params)
        if count and group.size > 1
    )
    if not training.overlap_param_gather:
        return whole
    buckets = max(1, math.ceil(params.total / BUCKET))
    return whole * (1 - overlap * (1 - 1 / buckets))


def _optimizer(training: TrainingConfig, params: Parameters, device: DeviceCosts) -> float:
    share = 0.0
    for count, group in _groups(training, params):
        share += count / group.size if training.use_distributed_optimizer else count
    found = device.optimizer(share, training.fused_step or training.uses_engine)
    if optimizer.moves(training):
        # Main parameters and moments move both ways; the step overlaps with a part.
        away = share * (8 if training.reuse_fp32_param else 12)
        found = max(found, 2 * device.host_copy(away))
    return found


def throughput(training: TrainingConfig, seconds_of_step: float) -> float:
    return training.global_batch_size * training.seq_length / seconds_of_step


def by_category(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda each: -each[1])
