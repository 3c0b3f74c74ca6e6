"""Best-first search for the fastest layouts that fit, by a lower bound on time.

A visited layout is replaced by its memory variants with their own bounds; these are checked for memory, then simulated.
The search ends when the next bound exceeds the slowest of the best, so it misses no better one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from . import arguments, candidates, context, estimate, layouts, optimizer, orders, parameters, step_time, traces
from .candidates import LayoutCandidate
from .layers import Chunk
from .parameters import Parameters
from .step_time import Pricer, StepTime
from .training import ArgumentError, TrainingConfig

# Bound, order among equals, candidate, and its training if it is a variant.
_Queued = tuple[float, int, LayoutCandidate, TrainingConfig | None]
# Candidates whose layers are traced with those of the next one, on all cores.
_AHEAD = 1000


@dataclass(frozen=True)
class FoundLayout:
    candidate: LayoutCandidate
    training: TrainingConfig
    step: StepTime
    bytes: int
    stage: int

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True)
class Result:
    """Search result.

    Attributes:
        best: fastest first, each layout once.
        front: Pareto front of time and memory of all simulated.
        considered: all candidates. impossible: those that cannot run, by reason.
        too_large: do not fit. simulated: step was simulated.
        unneeded: take time for memory that fits without.
        pruned: bound above the best.
        least_bytes: minimum of those visited.
    """

    best: Sequence[FoundLayout]
    front: Sequence[FoundLayout]
    considered: int
    impossible: Counter[str]
    too_large: int
    unneeded: int
    simulated: int
    pruned: int
    least_bytes: int


class Search:
    """Candidates of one command on one device.

    Args:
        base: the training for a TP size, which affects vocabulary padding.
        budget: bytes per rank.
        tell: called with (done, total, what is done) while it runs.
    """

    def __init__(
        self,
        base: Callable[[int], TrainingConfig],
        world_size: int,
        budget: float,
        pricer: Pricer,
        reserve: float = 0.0,
    ) -> None:
        self._base = base
        self.world_size, self.budget, self.pricer, self.reserve = world_size, budget, pricer, reserve
        self._bases: dict[int, TrainingConfig] = {}
        self._layouts: dict[object, str] = {}
        self._traced: set[LayoutCandidate] = set()
        self._held: dict[LayoutCandidate, list[Parameters]] = {}
        self._fit: dict[LayoutCandidate, bool] = {}
        self._whole: dict[LayoutCandidate, tuple[TrainingConfig, float, Parameters]] = {}

    def base(self, tp: int) -> TrainingConfig:
        if tp not in self._bases:
            self._bases[tp] = self._base(tp)
        return self._bases[tp]

    def space(self, vpp: int = 0) -> Iterable[LayoutCandidate]:
        for layout in self.layouts(vpp):
            yield from candidates.variants(self.base(1), layout)

    def layouts(self, vpp: int = 0) -> Iterable[LayoutCandidate]:
        return candidates.layouts(self.base(1), self.world_size, self.pricer.device.ranks_per_node, vpp)

    def training(self, candidate: LayoutCandidate) -> tuple[LayoutCandidate, TrainingConfig]:
        """Candidate and training, with a layout if needed; raises ArgumentError."""
        base = self.base(candidate.tp)
        stages = candidate.pp * candidate.vpp
        if candidate.pp > 1 and (base.num_layers % stages or base.mtp_num_layers):
            candidate = replace(candidate, layout=self._layout(candidate))
        return candidate, arguments.check(candidate.applied(base))

    def _layout(self, candidate: LayoutCandidate) -> str:
        whole = replace(candidate, pp=1, vpp=1, layout="", recompute="none", states="kept", micro_batch=1)
        key = (whole, candidate.pp * candidate.vpp, candidate.recompute)
        if key not in self._layouts:
            base = replace(whole, recompute=candidate.recompute).applied(self.base(candidate.tp))

            def price(chunk: Chunk) -> float:
                return self.pricer.busy(base, chunk, 0)

            layers = [price(Chunk((number,), False, False, 0, False)) for number in range(base.num_layers)]
            further = price(Chunk((), False, False, 1, False)) if base.mtp_num_layers else 0.0
            loss = price(Chunk((), False, True, 0, True))
            text = layouts.balanced(layers, further, base.mtp_num_layers, loss, candidate.pp * candidate.vpp)
            self._layouts[key] = text or ""
        if not self._layouts[key]:
            raise ArgumentError(f"the layers cannot be divided over {candidate.pp * candidate.vpp} pipeline stages")
        return self._layouts[key]

    def bound(self, candidate: LayoutCandidate, training: TrainingConfig) -> float:
        """Lower bound on seconds."""
        return step_time.lower_bound(training, self.pricer, self._parameters(candidate, training))

    def least_bytes(self, candidate: LayoutCandidate, training: TrainingConfig) -> float:
        """State bytes of the peak rank."""
        return max(
            states.weights + states.gradients + states.optimizer
            for stage, held in enumerate(self._parameters(candidate, training))
            for states in [optimizer.states(training, held, stage)]
        )

    def _parameters(self, candidate: LayoutCandidate, training: TrainingConfig) -> list[Parameters]:
        """Of each stage."""
        key = replace(candidate, recompute="none", states="kept", micro_batch=1)
        if key not in self._held:
            self._held[key] = [parameters.of_stage(training, row) for row in orders.chunks_of_ranks(training)]
        return self._held[key]

    def bytes(self, training: TrainingConfig, most: float = float("inf")) -> tuple[int, int]:
        """Bytes and stage of the peak rank; stops early above `most`."""
        worst = (0, 0)
        for stage, row in enumerate(orders.chunks_of_ranks(training)):
            worst = max(worst, (estimate.rank(training, stage, row).total + int(self.reserve), stage))
            if worst[0] > most:
                break
        return worst

    def _fits(self, candidate: LayoutCandidate) -> bool:
        if candidate not in self._fit:
            try:
                _, training = self.training(candidate)
                self._fit[candidate] = self.bytes(training, self.budget)[0] <= self.budget
            except ArgumentError:
                self._fit[candidate] = False
        return self._fit[candidate]

    def _trace(self, candidate: LayoutCandidate, queue: list[_Queued]) -> None:
        """Trace the layers of a candidate, if they are new, with those of candidates to come."""

        def key(each: LayoutCandidate) -> LayoutCandidate:
            return replace(each, pp=1, vpp=1, states="kept", layout="")

        if key(candidate) not in self._traced:
            several = [candidate, *(each[2] for each in heapq.nsmallest(_AHEAD, queue))]
            new = {*map(key, several)} - self._traced
            traces.prepare([each.applied(self.base(each.tp)) for each in new])
            self._traced |= new

    def evaluate(self, candidate: LayoutCandidate) -> FoundLayout:
        """Evaluate a candidate, even if it does not fit; raises ArgumentError if it cannot run."""
        candidate, training = self.training(candidate)
        size, stage = self.bytes(training)
        return FoundLayout(candidate, training, step_time.step(training, self.pricer), size, stage)

    def found(self, training: TrainingConfig) -> FoundLayout:
        """A training as it is. Raises ArgumentError."""
        size, stage = self.bytes(training)
        algorithm = context.algorithm(training, 0) if training.cp > 1 else ""
        candidate = LayoutCandidate(
            training.tp, training.pp, training.vpp, training.cp, algorithm, training.ep, training.micro_batch_size,
            training.recompute_granularity or "none",
        )  # fmt: skip
        return FoundLayout(candidate, training, step_time.step(training, self.pricer), size, stage)

    def quick(self, layout: LayoutCandidate) -> tuple[float, float]:
        """Lower bounds on seconds and bytes with any memory options, without stages.

        The peak stage has at least the average. Raises ArgumentError if no stage runs it.
        """
        key = replace(layout, pp=1, vpp=1)
        if key not in self._whole:
            alone = key.applied(self.base(layout.tp)).replace(world_size=self.world_size)
            context.check(alone)
            chunk = Chunk(tuple(range(alone.num_layers)), True, True, alone.mtp_num_layers, True)
            self._whole[key] = (alone, self.pricer.busy(alone, chunk, 0), parameters.of_stage(alone, [chunk]))
        alone, busy, held = self._whole[key]
        stages, ends = layout.pp * layout.vpp, 0.0
        if alone.num_layers % stages == 0 and not alone.mtp_num_layers and orders.fills_and_drains(alone):
            # First chunks of all ranks but the last.
            first = tuple(range((layout.pp - 1) * (alone.num_layers // stages)))
            ends = self.pricer.busy(alone, Chunk(first, False, False, 0, False), 0)
        dp = self.world_size // (layout.tp * layout.pp * layout.cp)
        microbatches = self.base(layout.tp).global_batch_size // (layout.micro_batch * dp)
        share = Parameters(held.dense // layout.pp, held.experts // layout.pp)
        frugal = replace(layout, recompute="none", states=candidates.states_of(self.base(layout.tp))[-1])
        states = optimizer.states(frugal.applied(self.base(layout.tp)), share, 0)
        size = states.weights + states.gradients + states.optimizer + self.reserve
        return busy / layout.pp * microbatches + ends, size

    def run(
        self,
        count: int = 10,
        chosen: Callable[[LayoutCandidate], bool] = lambda candidate: candidate.states != "swapped",
        vpp: int = 0,
        progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    ) -> Result:
        """Find the fastest `count` candidates that `chosen` accepts, with no memory option that is not needed."""
        impossible: Counter[str] = Counter()
        queue: list[_Queued] = []
        considered = too_large = unneeded = seen = 0
        least = 0.0
        base = self.base(1)
        for layout in self.layouts(vpp):
            wanted = sum(map(chosen, candidates.variants(base, layout)))
            considered += wanted
            if not wanted:
                continue
            progress(0, 0, f"{considered} layouts")
            try:
                seconds, size = self.quick(layout)
            except ArgumentError as error:
                impossible[str(error).partition(":")[0]] += wanted
                continue
            least = min(least or size, size)
            if size > self.budget:
                too_large += wanted
                continue
            queue.append((seconds, len(queue), layout, None))
        heapq.heapify(queue)
        number = total = len(queue)
        best: list[FoundLayout] = []
        fastest: dict[LayoutCandidate, FoundLayout] = {}
        every: list[FoundLayout] = []
        pruned = 0
        while queue:
            bound, _, candidate, training = heapq.heappop(queue)
            if len(best) == count and bound >= best[-1].seconds:
                queue.append((bound, 0, candidate, training))
                pruned = sum(1 if each[3] else sum(map(chosen, candidates.variants(base, each[2]))) for each in queue)
                break
            if training is None:
                seen += 1
                progress(seen, total, f"{len(every)} simulated")
                for variant in filter(chosen, candidates.variants(base, candidate)):
                    try:
                        full, training = self.training(variant)
                        if self.least_bytes(full, training) + self.reserve > self.budget:
                            too_large += 1
                            continue
                        number += 1
                        heapq.heappush(queue, (self.bound(full, training), number, full, training))
                    except ArgumentError as error:
                        impossible[str(error).partition(":")[0]] += 1
                continue
            self._trace(candidate, queue)
            try:
                traces.of(training)
            except ArgumentError as error:
                impossible[str(error).partition(":")[0]] += 1
                continue
            layout = replace(candidate, recompute="none", states="kept", layout="")
            plain = replace(candidate, layout="")
            cheaper = [
                each
                for each in filter(chosen, candidates.variants(base, layout))
                if each != plain and candidates.costs_less(each, plain)
            ]
            if any(map(self._fits, cheaper)):
                unneeded += 1
                continue
            if not self._fits(plain):
                too_large += 1
                continue
            try:
                step = step_time.step(training, self.pricer)
            except ArgumentError as error:
                impossible[str(error).partition(":")[0]] += 1
                continue
            found = FoundLayout(candidate, training, step, *self.bytes(training))
            every.append(found)
            # Keeps each layout's fastest fit; ties keep the first, with fewer options.
            if layout not in fastest or found.seconds < fastest[layout].seconds:
                fastest[layout] = found
                best = sorted(fastest.values(), key=lambda each: (each.seconds, each.bytes))[:count]
        return Result(best, front(every), considered, impossible, too_large, unneeded, len(every), pruned, int(least))


def front(every: Iterable[FoundLayout]) -> list[FoundLayout]:
    """Pareto front, fastest first."""
    found: list[FoundLayout] = []
    for each in sorted(every, key=lambda one: (one.seconds, one.bytes)):
        if not found or each.bytes < found[-1].bytes:
            found.append(each)
    return found
