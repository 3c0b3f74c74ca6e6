"""Builds and simulates a command's pipeline order and its alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_lite.pipeline import check, costs, orders, recompute_plan, steps, zero_bubble
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.simulate import Simulation, simulate
from mindspeed_lite.pipeline.steps import Schedule

from . import pipeline_costs
from .pipeline_costs import StepSeconds
from .training import ArgumentError, TrainingConfig

_IN_ADVANCE, _IN_BUBBLE = "+recompute-in-advance", "+recompute-in-bubble"
# Orders that depend on costs, or add recomputation.
DERIVED = ("zb-auto", "zbv-auto", f"interleaved{_IN_ADVANCE}", f"interleaved{_IN_BUBBLE}")
# Order and group flags that `planner.read` ignores.
_VALUES = ("--schedules-method", "--pipeline-schedule", "--pipeline-schedule-max-live", "--pipeline-schedule-trace")
_SWITCHES = (
    "--dualpipev-dw-detach", "--recompute-in-bubble", "--recompute-in-advance", "--overlap-moe-expert-parallel-comm",
    "--optimize-send-recv-comm",
)  # fmt: skip


@dataclass(frozen=True)
class OrderFlags:
    rest: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()

    @classmethod
    def read(cls, words: Sequence[str]) -> OrderFlags:
        rest: list[str] = []
        values: dict[str, str] = {}
        switches = set()
        left = iter(words)
        for word in left:
            flag, has_value, value = word.partition("=")
            if flag in _SWITCHES:
                switches.add(flag)
            elif flag in _VALUES:
                found = value if has_value else next(left, None)
                if found is None:
                    raise ArgumentError(f"{flag} has no value: give one after it")
                values[flag] = found
            else:
                rest.append(word)
        return cls(rest, values, frozenset(switches))

    @property
    def max_live(self) -> int | None:
        text = self.values.get("--pipeline-schedule-max-live")
        if text is None:
            return None
        if not text.isdecimal() or int(text) < 1:
            raise ArgumentError(f"--pipeline-schedule-max-live is a whole number of at least 1, not {text!r}")
        return int(text)

    def order(self, training: TrainingConfig) -> str:
        name = self.values.get("--schedules-method") or self.values.get("--pipeline-schedule", "")
        if name == "dualpipev" and "--dualpipev-dw-detach" in self.switches:
            name = "dualpipev-dw-detach"
        elif name == "dualpipev" and not {"--gradient-accumulation-fusion", "--mindspeed-lite-auto"} & {*self.rest}:
            name = "dualpipev-whole"  # with the fusion, DualPipeV defers weight gradients
        elif not name and "--overlap-moe-expert-parallel-comm" in self.switches:
            name = "interleaved-overlap"
        elif not name:
            name = "interleaved" if training.vpp > 1 and training.pp > 1 else "1f1b"
        return name + "".join(each for each in (_IN_ADVANCE, _IN_BUBBLE) if f"--{each[1:]}" in self.switches)

    def has_one_queue(self, schedule: Schedule) -> bool:
        """Whether one group carries all messages between two ranks in sequence.

        With exactly two ranks, Megatron's unbatched messages use a group per sender.
        """
        if "--optimize-send-recv-comm" in self.switches:
            return False
        is_overlapped = schedule.num_chunks > 1 and "--no-overlap-p2p-communication" not in self.rest
        return schedule.num_ranks > 2 or not (is_overlapped or schedule.has_weight_grads)


@dataclass(frozen=True)
class OrderCandidate:
    """A simulated order.

    constant_bytes: per rank, independent of micro-batches. activation_bytes: per rank, the rest at its peak.
    fits: every rank is within the limit; True without a limit.
    """

    name: str
    simulation: Simulation
    constant_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    fits: bool

    @property
    def peak_bytes(self) -> float:
        return max(map(sum, zip(self.constant_bytes, self.activation_bytes, strict=True)))

    @property
    def peak_live(self) -> int:
        schedule = self.simulation.schedule
        return max(costs.peak_live(schedule, rank) for rank in range(schedule.num_ranks))


def flags(candidate: OrderCandidate) -> list[str] | None:
    """Flags that run the order, in place of a command's own; None if it is only simulated."""
    name, *recomputed = candidate.name.split("+")
    chunks, live = candidate.simulation.schedule.num_chunks, str(candidate.peak_live)
    virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    dualpipev = ["--schedules-method", "dualpipev"]
    found = {
        "1f1b": [],
        "interleaved": virtual,
        "interleaved-overlap": [*virtual, "--overlap-moe-expert-parallel-comm"],
        "zb-auto": [*virtual, "--pipeline-schedule", "zb-auto", "--pipeline-schedule-max-live", live],
        "zbv-auto": None,
        "dualpipev": [*dualpipev, "--gradient-accumulation-fusion"],
        "dualpipev-whole": dualpipev,
        "dualpipev-dw-detach": [*dualpipev, "--gradient-accumulation-fusion", "--dualpipev-dw-detach"],
    }.get(name, [*virtual, "--pipeline-schedule", name])
    return None if found is None else [*found, *(f"--{each}" for each in recomputed)]


def fastest(found: Sequence[OrderCandidate]) -> OrderCandidate | None:
    """Fastest that fits; ties by memory."""
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: (each.simulation.makespan, each.peak_bytes), default=None)


@dataclass(frozen=True)
class OrderBuilder:
    """Builds and simulates orders of one training.

    seconds: measured; None: relative. overlap: seconds of an overlapped pair over the sum of its steps.
    limit: bytes per rank. max_live: bound of automatic orders, by default from the limit.
    """

    training: TrainingConfig
    flags: OrderFlags = OrderFlags()
    seconds: StepSeconds | None = None
    overlap: float = 1.0
    limit: float | None = None
    max_live: int | None = None

    def compare(self, asked: str) -> tuple[list[OrderCandidate], dict[str, str]]:
        """The command's and the requested orders, and why others of `all` do not apply.

        asked: comma-separated names; `all`.
        Raises OrderError, ScheduleError or ArgumentError if a named order does not apply.
        """
        own = self.flags.order(self.training)
        named = [name for name in asked.split(",") if name]
        wanted = [own, *(name for name in named if name != "all")]
        every = [*wanted, *((*orders.TRAINING_ORDERS, *DERIVED) if "all" in named else ())]
        found, refused = [], {}
        for name in dict.fromkeys(every):
            try:
                # The command's own order ignores the limit.
                builder = replace(self, max_live=self.flags.max_live, limit=None) if name == own else self
                found.append(self._simulated(name, builder._schedule(name)))
            except (OrderError, ArgumentError) as error:
                if name in wanted:
                    raise
                refused[name] = str(error).removeprefix(f"{name}: ")
        return found, refused

    def _simulated(self, name: str, schedule: Schedule) -> OrderCandidate:
        predicted = replace(
            pipeline_costs.costs(self.training, schedule.num_chunks, self.seconds, bool(schedule.recomputed)),
            pair=self.overlap,
            one_queue=self.flags.has_one_queue(schedule),
        )
        constant = tuple(pipeline_costs.constant_bytes(self.training, schedule.placement))
        kept = tuple(costs.peak_bytes(schedule, rank, predicted) for rank in range(schedule.num_ranks))
        most = max(map(sum, zip(constant, kept, strict=True)))
        fits = self.limit is None or most <= self.limit
        return OrderCandidate(name, simulate(schedule, predicted), constant, kept, fits)

    def _schedule(self, name: str) -> Schedule:
        training = self.training
        chunks, is_full = training.vpp if training.pp > 1 else 1, training.recompute_granularity == "full"
        if name.endswith(_IN_ADVANCE):
            if not is_full:
                raise OrderError(f"{name}: it needs --recompute-granularity full")
            return recompute_plan.in_advance(self._schedule(name.removesuffix(_IN_ADVANCE)))
        if name.endswith(_IN_BUBBLE):
            if is_full:
                raise OrderError(f"{name}: with --recompute-granularity full all is recomputed already")
            schedule = self._schedule(name.removesuffix(_IN_BUBBLE))
            return recompute_plan.in_bubble(schedule, self.max_live)
        if name in ("zb-auto", "zbv-auto"):
            return self._automatic(name, chunks if name == "zb-auto" else 2)
        if ":" in name:
            return check.load(name, self._shape(chunks))
        if name not in orders.TRAINING_ORDERS:
            known = (*orders.TRAINING_ORDERS, *DERIVED)
            raise OrderError(f"there is no order {name!r}: choose of {', '.join(known)}, or FILE.py:FUNCTION")
        own_chunks = chunks if chunks > 1 or training.pp == 1 else 2
        return orders.build(name, self._shape(orders.ORDERS[name].chunks or own_chunks))

    def _shape(self, chunks: int) -> PipelineShape:
        t = self.training
        return PipelineShape(t.pp, t.microbatches, chunks, t.microbatch_group_size_per_vp_stage)

    def _automatic(self, name: str, chunks: int) -> Schedule:
        """Automatic order bounded by `max_live`, or the largest bound within the limit."""
        shape, ranks = self._shape(chunks), self.training.pp
        placement = steps.v_placement(ranks) if name == "zbv-auto" else steps.interleaved_placement(ranks, chunks)

        def at(bound: int | None) -> Schedule:
            return replace(zero_bubble.automatic(shape, bound, placement), name=name)

        if self.max_live is not None or self.limit is None:
            return at(self.max_live)
        least, most = chunks, 2 * ranks * chunks
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self._simulated(name, at(middle)).fits else (least, middle - 1)
        return at(least)
