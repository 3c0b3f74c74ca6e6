"""Which pipeline orders a training command runs or is compared with, and what each of them comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_lite import planner
from mindspeed_lite.pipeline import check, costs, orders, recompute_plan, steps, zero_bubble
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.simulate import Simulation, simulate
from mindspeed_lite.pipeline.steps import Placement, Schedule
from mindspeed_lite.planner import pipeline_costs
from mindspeed_lite.planner.pipeline_costs import StepSeconds

GIB = float(1 << 30)
_IN_ADVANCE, _IN_BUBBLE = "+recompute-in-advance", "+recompute-in-bubble"
# Orders that follow from costs, or are another order with recomputation.
DERIVED = ("zb-auto", "zbv-auto", f"interleaved{_IN_ADVANCE}", f"interleaved{_IN_BUBBLE}")
# What the planner does not read: flags that choose the order and the groups, with a value or without.
_VALUES = ("--schedules-method", "--pipeline-schedule", "--pipeline-schedule-max-live", "--pipeline-schedule-trace")
_SWITCHES = (
    "--dualpipev-dw-detach", "--recompute-in-bubble", "--recompute-in-advance", "--overlap-moe-expert-parallel-comm",
    "--optimize-send-recv-comm",
)  # fmt: skip
# With these, DualPipeV puts weight gradients aside.
_FUSED = frozenset(("--gradient-accumulation-fusion", "--mindspeed-lite-auto"))


@dataclass(frozen=True)
class Command:
    """A training command: the flags that choose its order, and the other words."""

    rest: Sequence[str]
    values: Mapping[str, str]
    switches: frozenset[str]

    @classmethod
    def read(cls, words: Sequence[str]) -> Command:
        rest: list[str] = []
        values: dict[str, str] = {}
        switches = set()
        place = 0
        while place < len(words):
            flag, has_value, value = words[place].partition("=")
            place += 1
            if flag in _SWITCHES:
                switches.add(flag)
            elif flag in _VALUES:
                if not has_value and place == len(words):
                    raise planner.ArgumentError(f"{flag} has no value: give one after it")
                values[flag] = value if has_value else words[place]
                place += not has_value
            else:
                rest.append(words[place - 1])
        return cls(rest, values, frozenset(switches))

    @property
    def max_live(self) -> int | None:
        """Return the bound of the command's own automatic order."""
        text = self.values.get("--pipeline-schedule-max-live")
        if text is None:
            return None
        if not text.isdecimal() or int(text) < 1:
            raise planner.ArgumentError(f"--pipeline-schedule-max-live is a whole number of at least 1, not {text!r}")
        return int(text)

    def order(self, training: planner.TrainingConfig) -> str:
        """Return the name of the order that the command runs."""
        method = self.values.get("--schedules-method") or self.values.get("--pipeline-schedule", "")
        if method == "dualpipev":
            name = "dualpipev-dw-detach" if "--dualpipev-dw-detach" in self.switches else "dualpipev"
            if name == "dualpipev" and not _FUSED.intersection(self.rest):
                name = "dualpipev-whole"
        elif method:
            name = method
        elif "--overlap-moe-expert-parallel-comm" in self.switches:
            name = "interleaved-overlap"
        else:
            name = "interleaved" if training.vpp > 1 and training.pp > 1 else "1f1b"
        for flag in ("--recompute-in-advance", "--recompute-in-bubble"):
            name += f"+{flag.removeprefix('--')}" if flag in self.switches else ""
        return name

    def has_one_queue(self, schedule: Schedule) -> bool:
        """Return whether one group carries all messages between two ranks, and so one after the other.

        Between exactly two ranks Megatron's single messages, not batched ones, have a group for each sender.
        """
        if "--optimize-send-recv-comm" in self.switches:
            return False
        is_overlapped = schedule.num_chunks > 1 and "--no-overlap-p2p-communication" not in self.rest
        return schedule.num_ranks > 2 or not (is_overlapped or schedule.has_weight_grads)


@dataclass(frozen=True)
class Given:
    """What is known besides the command.

    command: whose groups carry the messages.
    seconds: measured ones. overlap: seconds of an overlapped pair as a share of its two steps.
    limit: GiB of a rank. max_live: the bound of the automatic order, which else follows from the limit.
    """

    seconds: StepSeconds | None = None
    overlap: float = 1.0
    limit: float | None = None
    max_live: int | None = None
    command: Command = field(default_factory=lambda: Command.read(()))


@dataclass(frozen=True)
class Candidate:
    """An order, simulated.

    constant_bytes: of each rank, what no micro-batch changes. activation_bytes: of each rank, the rest at its peak.
    fits: whether every rank stays within the limit; True where there is none.
    """

    name: str
    simulation: Simulation
    constant_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    fits: bool

    @property
    def peak_bytes(self) -> float:
        """Bytes of the rank that takes most."""
        return max(map(sum, zip(self.constant_bytes, self.activation_bytes, strict=True)))

    @property
    def peak_live(self) -> int:
        """Most chunk activations that a rank holds at once."""
        schedule = self.simulation.schedule
        return max(costs.peak_live(schedule, rank) for rank in range(schedule.num_ranks))


def evaluate(
    command: Command,
    training: planner.TrainingConfig,
    asked: str,
    given: Given,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the command's own order and those asked for, and why the others of `all` do not apply.

    asked: names with commas between; `all`.
    Raises OrderError, ScheduleError or ArgumentError where an order that is named does not apply.
    """
    own, given = command.order(training), replace(given, command=command)
    named = [name for name in asked.split(",") if name]
    wanted = [own, *(name for name in named if name != "all")]
    every = [*wanted, *((*orders.TRAINING_ORDERS, *DERIVED) if "all" in named else ())]
    found, refused = [], {}
    for name in dict.fromkeys(every):
        try:
            # The command's own order is what it is, whatever the limit.
            known = replace(given, max_live=command.max_live, limit=None) if name == own else given
            schedule = _schedule(name, training, known)
            found.append(_evaluated(name, schedule, training, given))
        except (OrderError, planner.ArgumentError) as error:
            if name in wanted:
                raise
            refused[name] = str(error).removeprefix(f"{name}: ")
    return found, refused


def best(found: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest of those that fit; among equals the one that takes least."""
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: (each.simulation.makespan, each.peak_bytes), default=None)


def _evaluated(name: str, schedule: Schedule, training: planner.TrainingConfig, given: Given) -> Candidate:
    predicted = pipeline_costs.costs(training, schedule.num_chunks, given.seconds, bool(schedule.recomputed))
    predicted = replace(predicted, pair=given.overlap, one_queue=given.command.has_one_queue(schedule))
    ranks, limit = range(schedule.num_ranks), given.limit
    constant = pipeline_costs.constant_bytes(training, schedule.placement)
    kept = tuple(costs.peak_bytes(schedule, rank, predicted) for rank in ranks)
    fits = limit is None or all(constant[rank] + kept[rank] <= limit * GIB for rank in ranks)
    return Candidate(name, simulate(schedule, predicted), tuple(constant), kept, fits)


def _schedule(name: str, training: planner.TrainingConfig, given: Given) -> Schedule:
    chunks = training.vpp if training.pp > 1 else 1
    for suffix, added in _ADDED.items():
        if name.endswith(suffix):
            return added(_schedule(name.removesuffix(suffix), training, given), training, given)
    if name == "zb-auto":
        return _automatic(
            name, _shape(training, chunks), steps.interleaved_placement(training.pp, chunks), training, given
        )
    if name == "zbv-auto":
        return _automatic(name, _shape(training, 2), steps.v_placement(training.pp), training, given)
    if ":" in name:
        return check.load(name, _shape(training, chunks))
    if name not in orders.TRAINING_ORDERS:
        known = (*orders.TRAINING_ORDERS, *DERIVED)
        raise OrderError(f"there is no order {name!r}: choose of {', '.join(known)}, or FILE.py:FUNCTION")
    own_chunks = chunks if chunks > 1 or training.pp == 1 else 2
    return orders.build(name, _shape(training, orders.ORDERS[name].chunks or own_chunks))


def _shape(training: planner.TrainingConfig, chunks: int) -> PipelineShape:
    return PipelineShape(training.pp, training.microbatches, chunks, training.microbatch_group_size_per_vp_stage)


def _automatic(
    name: str, shape: PipelineShape, placement: Placement, training: planner.TrainingConfig, given: Given
) -> Schedule:
    """The automatic zero-bubble order as a training finds it: for stages and steps that all take the same time.

    Its bound is the one that is given, or the largest that fits into the memory limit.
    """
    alike = costs.uniform(shape.ranks * shape.chunks)

    def at(bound: int | None) -> Schedule:
        return replace(zero_bubble.automatic(shape, alike, bound, placement), name=name)

    if given.max_live is not None or given.limit is None:
        return at(given.max_live)
    least, most = shape.chunks, 2 * shape.ranks * shape.chunks
    while least < most:
        middle = (least + most + 1) // 2
        if _evaluated(name, at(middle), training, given).fits:
            least = middle
        else:
            most = middle - 1
    return at(least)


def _in_advance(schedule: Schedule, training: planner.TrainingConfig, given: Given) -> Schedule:
    if training.recompute_granularity != "full":
        raise OrderError(f"{schedule.name}{_IN_ADVANCE}: it needs --recompute-granularity full")
    return recompute_plan.in_advance(schedule)


def _in_bubble(schedule: Schedule, training: planner.TrainingConfig, given: Given) -> Schedule:
    if training.recompute_granularity == "full":
        raise OrderError(f"{schedule.name}{_IN_BUBBLE}: with --recompute-granularity full all is recomputed already")
    # As a training finds it: for stages and steps that all take the same time.
    return recompute_plan.in_bubble(schedule, given.max_live, costs.uniform(schedule.num_stages))


_ADDED: Mapping[str, Callable[[Schedule, planner.TrainingConfig, Given], Schedule]] = {
    _IN_ADVANCE: _in_advance,
    _IN_BUBBLE: _in_bubble,
}
