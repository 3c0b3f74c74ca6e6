"""Trains one layout without a feature and with each of several, on Megatron-core alone.

`trained(trainer, layout, features)` runs it on a release; as a script of `training_server` it is
`on_and_off.py OUT LAYOUT STEPS OPTIONS NAME...`, a name being FEATURE or, on a model of which a part is frozen,
"FEATURE: KIND" (`frozen.KINDS`). A feature brings those it requires; what it sets for a script is in the model's
configuration.
Lanes stand in the place of a device's streams. Where Megatron alone cannot train in a layout, or gives it other
weights, a training on one rank is what the others are compared with.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature
from mindspeed_lite.ops import dispatch
from tests.harness import core_loop, live_undo, training_server
from tests.harness.training import DRIFT, FIRST_NORM, Result, Trainer, fault

STEPS, FROZEN_STEPS = 4, 2
# Seconds that a layout has to begin and to train without a feature, and that each feature has.
STARTING, TRAINING = 600, 200
# Moments in fp8 are another training; its losses stay near.
DEVIATION = 2.0**-5
LAYOUTS = {**live_undo.LAYOUTS, **live_undo.TRAINED_ALONE}
# Of the rank that such a layout is compared with.
REFERENCES: dict[str, dict[str, Any]] = {"context": {"cp": 1}, "V": {"pp": 1, "vpp": None}}
# Where the first layout that a feature fits leaves it nothing to do.
EXERCISED = {
    "bias_dropout_fusion": "biases",
    "context_parallel_algo": "context",
    "moe_router_fusion": "router in fp32",
    "schedules_method": "V",
    "use_fused_embedding": "tensor",
}
# So that it has something to do, whatever it measures.
BESIDE: dict[str, dict[str, Any]] = {
    "balanced_moe_experts": {"balanced_moe_break_even": 0.0},
    "enable_expert_placement": {"expert_placement_freq": 1, "expert_placement_break_even": 0.0},
}
# Between a feature's name and the kind of frozen model that it trains.
FROZEN = ": "
_CLASSES = ("bitwise", "ulp", "deviation")


@dataclass
class Outcome:
    """How a feature trained: losses and gradient norms of each step as hexadecimal floats, or what failed."""

    off: list[tuple[str, str]] = field(default_factory=list)
    on: list[tuple[str, str]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    error: str = ""

    def drift(self) -> float:
        """The largest relative distance of two losses of one step; 0 without any."""
        pairs = [(float.fromhex(a), float.fromhex(b)) for (a, _), (b, _) in zip(self.off, self.on, strict=False)]
        return max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)

    def fault(self, numerics: str, first_norm: float = FIRST_NORM) -> str:
        """What is not as a feature of this class promises; "" if all is."""
        if self.error:
            return self.error.strip().splitlines()[-1]
        if not self.on or len(self.on) != len(self.off):
            return f"{len(self.on)} steps with it, {len(self.off)} without"
        if self.idle:
            return f"never called: {', '.join(self.idle)}"
        if numerics == "bitwise":
            return "" if self.on == self.off else f"not the same bits: {fault(self.off, self.on, 0.0)}"
        return fault(self.off, self.on, DRIFT if numerics == "ulp" else DEVIATION, first_norm)


def numerics_of(feature: Feature) -> str:
    """The class of a feature together with those it brings."""
    return max((each.numerics for each in live_undo._company(feature.name)), key=_CLASSES.index)


def layout_of(feature: Feature, release: str = "") -> str | None:
    """The layout that a feature is trained in, on that release if one is named; None if there is none."""
    choices = [EXERCISED[feature.name]] if feature.name in EXERCISED else LAYOUTS
    fits = (each for each in choices if {*live_undo.why_not(feature, each, release)} <= {live_undo.COMBINED})
    return next(fits, None)


def layouts(release: str) -> dict[str, list[str]]:
    """By layout, the features that a release has and that are trained in it."""
    found: dict[str, list[str]] = {}
    for each in runtime.catalogue():
        layout = layout_of(each, release)
        company = live_undo._company(each.name)
        if layout is not None and not any(one.patches_for(release)[1] for one in company):
            found.setdefault(layout, []).append(each.name)
    return found


def reference(trainer: Trainer, layout: str, steps: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Losses and gradient norms of the layout without a feature, with `options` of `core_loop` besides its own."""
    argv = _argv(trainer, layout, steps, options)
    ranks = 1 if layout in REFERENCES else LAYOUTS[layout][0]
    trainer.run(argv=[*argv, FROZEN], entry="script", arm="device", nproc=ranks, timeout=STARTING).check()
    found = json.loads(Path(argv[1], "reference.json").read_text())
    return [(loss, norm) for loss, norm in found[""]]


def _argv(trainer: Trainer, layout: str, steps: int, options: dict[str, Any]) -> list[str]:
    out = trainer.scratch / f"on_and_off_{layout.replace(' ', '_')}"
    out.mkdir(exist_ok=True)
    return [str(Path(__file__)), str(out), layout, str(steps), json.dumps(options)]


def trained(
    trainer: Trainer, layout: str, features: list[str], steps: int = STEPS, options: dict[str, Any] | None = None
) -> dict[str, Outcome]:
    """Train them on the release of `trainer`; of several ranks the last one's figures count.

    options: of `core_loop`, besides the layout's own.

    A feature that ends the ranks, or leaves them waiting, is a fault; those behind it are trained by new ranks.
    """
    is_frozen = any(FROZEN in each for each in features)
    argv = _argv(trainer, layout, FROZEN_STEPS if is_frozen else steps, options or {})
    if layout in REFERENCES:
        kinds = dict.fromkeys(FROZEN + each.partition(FROZEN)[2] for each in features)
        job: dict[str, Any] = dict(entry="script", arm="device", nproc=1, timeout=STARTING)
        ended = _ended(trainer.run(argv=[*argv, *kinds], **job))
        if ended:
            return {name: Outcome(error=f"one rank, without it: {ended}") for name in features}
    found: dict[str, Outcome] = {}
    while left := [name for name in features if name not in found]:
        found |= _round(trainer, LAYOUTS[layout][0], argv, left)
    return {name: found[name] for name in features}


def _round(trainer: Trainer, ranks: int, argv: list[str], features: list[str]) -> dict[str, Outcome]:
    """How the first of `features` trained, and those behind it as far as one process for each rank came."""
    out = Path(argv[1])
    for path in _files(out):
        path.unlink()
    timeout = STARTING + TRAINING * len(features)
    job: dict[str, Any] = dict(entry="script", arm="device", nproc=ranks, timeout=timeout)
    result = trainer.run(argv=[*argv, *features], **job)
    files = _files(out)
    rows = {path: {name: _read(row) for name, row in json.loads(path.read_text()).items()} for path in files}
    if len(files) < ranks:
        return {name: Outcome(error=f"without it: {_ended(result)}") for name in features}
    found = {name: each for name, each in rows[files[-1]].items() if all(name in its for its in rows.values())}
    # The first error is the cause: in other ranks a collective fails then.
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        found |= {name: each for name, each in rows[path].items() if each.error}
    at_fault = next((name for name in features if name not in found), None)
    if at_fault is not None and not any(each.error for each in found.values()):
        found[at_fault] = Outcome(error=_ended(result))
    return found


def _files(out: Path) -> list[Path]:
    """What the ranks have written, by rank."""
    return sorted(out.glob("[0-9]*.json"), key=lambda path: int(path.stem))


def _ended(result: Result) -> str:
    """How the first rank that failed ended, with the last line of its log; "" if none failed."""
    for rank, code in enumerate(result.codes):
        if code:
            lines = result.log(rank).strip().splitlines()
            return f"rank {rank} ended with {code}: {lines[-1] if lines else 'its log is empty'}"
    return ""


def _read(row: dict[str, Any]) -> Outcome:
    return Outcome(**{**row, **{name: [tuple(each) for each in row[name]] for name in ("off", "on")}})


class _Builder(live_undo.Bench):
    """Builds a model whose configuration asks for what the features in force set for a script."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.options = LAYOUTS[layout][1]


def _forget_operators() -> None:
    for name in dispatch.OPERATORS:
        dispatch.operator(name)._chosen.clear()


def main() -> None:
    out, layout, steps, more, *names = sys.argv[1:]
    live_undo.simulate()
    core_loop.dist.init_process_group("nccl")
    builder = _Builder(layout)

    def history(training: core_loop.Training) -> list[tuple[str, str]]:
        """Of the rank that has losses; the last one, of several."""
        found: list[Any] = [None] * core_loop.dist.get_world_size()
        core_loop.dist.all_gather_object(found, [each for _ in range(int(steps)) for each in training.step()])
        return next(each for each in reversed(found) if each)

    def options(kind: str) -> dict[str, Any]:
        ranks, found, _ = LAYOUTS[layout]
        # A pipeline wants more.
        return {**found, **json.loads(more), "frozen": kind, **({"micro_batches": 2} if kind and ranks == 1 else {})}

    reference = Path(out, "reference.json")
    if names[0].startswith(FROZEN):
        kinds = [name.removeprefix(FROZEN) for name in names]
        offs = {kind: history(core_loop.Training({**options(kind), **REFERENCES.get(layout, {})})) for kind in kinds}
        reference.write_text(json.dumps(offs))
        return
    offs = {}
    if layout in REFERENCES:
        known = json.loads(reference.read_text())
        offs = {kind: [(loss, norm) for loss, norm in each] for kind, each in known.items()}
    found: dict[str, dict[str, Any]] = {}
    rank = os.environ["RANK"]

    def write() -> None:
        part = Path(out, f"{rank}.part")
        part.write_text(json.dumps(found))
        part.replace(part.with_suffix(".json"))

    write()
    for name in names:
        feature_name, _, kind = name.partition(FROZEN)
        builder.options = options(kind)
        if kind not in offs:
            offs[kind] = history(core_loop.Training(builder.options))
        outcome = Outcome(offs[kind])
        feature = runtime.catalogue()[feature_name]
        _forget_operators()
        try:
            builder.enable(feature, **BESIDE.get(feature_name, {}))
            outcome.on = history(builder.build(feature))
            outcome.fallbacks = [f"{each.feature}: {each.reason}" for each in mindspeed_lite.report().fallbacks]
            called = training_server.called()
            # A model that is frozen may leave it nothing to do.
            outcome.idle = [] if kind or set(called) & set(feature.operators) else [*feature.operators]
        except Exception:
            outcome.error = traceback.format_exc()
        mindspeed_lite.disable()
        found[name] = asdict(outcome)
        write()
        if outcome.error and core_loop.dist.get_world_size() > 1:
            sys.exit(1)  # the others wait for this rank, or are in another collective than it


if __name__ == "__main__":
    main()
