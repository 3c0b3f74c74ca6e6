"""Trains one model under chosen plans of what layers keep, in turns within a process, for `benchmarks.adaptive_memory`.

Plans take turns by steps: `--adaptive-memory` changes what is recomputed between steps, so all of them have the same
weights, memory and load. Two trainings in separate processes take turns by steps too.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_lite.memory.memory_options import LayerOption
from mindspeed_lite.memory.recompute_choice import BudgetError, choose, leanest

ROOT = Path(__file__).resolve().parent.parent
WORKER = "MINDSPEED_LITE_BENCHMARK_PLANS"
MAX_CHECKS = 3


@dataclass
class Plan:
    """A plan and its measurements; `budget` is 0 where there is none.

    Attributes:
        longer: predicted seconds per micro-batch beyond keeping everything.
        peak: measured bytes of saved activations; 0 for a budget that cannot be met.
    """

    name: str
    budget: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    ways: tuple[LayerOption, ...] = ()
    longer: float = 0.0

    def take(self, ways: tuple[LayerOption, ...]) -> None:
        """Run like this."""
        self.ways, self.longer = ways, sum(way.seconds for way in ways)


@dataclass
class Turn:
    """In a rank: steps that alternate with those of another training; both share a folder, and one of them is 0.

    Turns are counted: a rank that is ahead of the one that gives the turn away does not take it twice.
    """

    folder: Path
    mine: int
    taken: int = 0

    def wait(self) -> None:
        """Until both trainings have come so far and it is this one's turn."""
        (self.folder / f"ready{self.mine}").touch()
        while not ((self.folder / f"ready{1 - self.mine}").exists() and self._given() == 2 * self.taken + self.mine):
            time.sleep(0.002)
        self.taken += 1

    def give(self) -> None:
        """The other one's turn; one rank says so."""
        written = self.folder / f"given{self.mine}"
        written.write_text(str(self._given() + 1))
        written.replace(self.folder / "given")

    def _given(self) -> int:
        file = self.folder / "given"
        return int(file.read_text()) if file.exists() else 0


Turns = Generator[tuple[Plan, bool], int, None]


def work(asked: Mapping[str, Any]) -> int:
    """The training process: run the script, and write what its plans took."""
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite.bench.probes import train_step
    from mindspeed_lite.engine import Session
    from mindspeed_lite.patches import adaptive_memory
    from mindspeed_lite.patches._shared import memory_choice
    from mindspeed_lite.platform import allocator

    # One process meets itself, at whatever port is free.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    allocator.keep_freed_memory()
    steps = _Steps(asked)

    class Planned(memory_choice.MemoryChoice):  # type: ignore[misc]
        """Runs every step under the plan whose turn it is."""

        def step(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
            if self._steps < memory_choice.RECORD_STEPS:
                result = self._recorded(original, given)
                if self._steps == memory_choice.RECORD_STEPS:
                    steps.begin(self._told[0])
                return result
            assert steps.now is not None
            for layer, way in zip(self._layers, steps.now.ways, strict=True):
                layer.run_again(way.again, way.swapped)
            return original(**given)

    def _state(session: Session) -> Any:
        return session.state(adaptive_memory.NAME, lambda: Planned(session, 1 << 60, False))

    if asked["planned"]:
        adaptive_memory._state = _state
    train_step.around_steps("counting", "a benchmark counts", steps.around)
    script = ROOT / "examples" / "pretrain_gpt.py"
    sys.argv[0] = str(script)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    plans = [{**asdict(plan), "ways": []} for plan in steps.plans]
    found = {"plans": plans, "losses": steps.losses, "chosen_steps": steps.chosen_steps}
    (Path(asked["folder"]) / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    return 0


class _Steps:
    """The turns of the plans of a process, or the steps of one that has none."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.losses: list[str] = []
        self.plans: list[Plan] = []
        #: How many losses there are when every chosen plan has run.
        self.chosen_steps = 0
        self.now: Plan | None = None
        self._asked = asked
        self._turn = Turn(Path(asked["turns"]), asked["turn"]) if "turns" in asked else None
        self._turns: Turns | None = None
        self._counts = False
        self._is_timed = False
        if not asked["planned"]:
            self._take(self._alone())

    def begin(self, told: Any) -> None:
        """Layers have been recorded: the plans take their turns from the next step on."""
        # On CPU nothing moves.
        told.rates = None
        self._take(self._planned(told))

    def _take(self, turns: Turns) -> None:
        self._turns = turns
        self.now, self._counts = next(turns)

    def _alone(self) -> Turns:
        plan = Plan(self._asked["name"])
        self.plans.append(plan)
        counted = self._asked["counted"]
        for number in range(counted + 1 + self._asked["rounds"]):
            found = yield plan, number == counted
            if number == counted:
                plan.peak = found
                plan.seconds.clear()
                self._is_timed = True

    def _planned(self, told: Any) -> Turns:
        options = told.options()
        nothing = tuple(min(each, key=lambda way: way.seconds) for each in options)
        everything = Plan("everything kept", ways=nothing)
        self.plans.append(everything)
        everything.peak = yield everything, True
        budgets = {f"{share:.0%}": int(share * everything.peak) for share in self._asked["shares"]}
        for name, budget in budgets.items():
            plan, within = Plan(name, budget), budget
            for _ in range(MAX_CHECKS):
                try:
                    plan.take(choose(options, told.moments, within).options)
                except BudgetError:
                    break
                plan.peak = yield plan, True
                if plan.peak <= budget:
                    break
                within -= plan.peak - budget
            self.plans.append(plan)
        least = Plan("the least possible")
        least.take(leanest(options, told.moments).options)
        least.peak = yield least, True
        self.plans.append(least)
        self.chosen_steps = len(self.losses)
        met = [plan for plan in self.plans if plan.ways]
        for number in range(self._asked["rounds"]):
            for plan in met if number % 2 == 0 else reversed(met):
                yield plan, False

    def around(self, wrapped: Callable[..., Any], session: Any) -> Callable[..., Any]:
        import torch.distributed as dist

        from mindspeed_lite.memory.saved_tensors import Tracker

        def train_step(*args: Any, **kwargs: Any) -> Any:
            plan, size = self.now, 0
            turn = self._turn if plan is not None and self._is_timed else None
            if turn is not None:
                turn.wait()
            start = time.perf_counter()
            # Ranks follow the same turns, so they have to agree on what they saw.
            seen: list[Any] = [None] * dist.get_world_size()
            if plan is not None and self._counts:
                addresses = {each.untyped_storage().data_ptr() for chunk in args[2] for each in chunk.parameters()}
                with Tracker(addresses.__contains__) as tracker:
                    result = wrapped(*args, **kwargs)
                dist.all_gather_object(seen, tracker.peak)
                size = max(seen)
            else:
                result = wrapped(*args, **kwargs)
                if plan is not None:
                    dist.all_gather_object(seen, time.perf_counter() - start)
                    plan.seconds.append(max(seen))
            if turn is not None and dist.get_rank() == 0:
                turn.give()
            self.losses += [float(each).hex() for each in result[0].values()]
            if plan is not None:
                assert self._turns is not None
                try:
                    self.now, self._counts = self._turns.send(size)
                except StopIteration:
                    sys.exit(0)
            return result

        return train_step


if __name__ == "__main__":
    sys.exit(work(json.loads(os.environ[WORKER])))
