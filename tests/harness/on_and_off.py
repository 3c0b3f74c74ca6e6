"""Trains a layout without a feature and with it, on Megatron-core alone: two jobs of `tests.harness.jobs`.

A feature brings those it requires; what it sets for a script is in the model's configuration. Lanes stand in the place
of a device's streams. Where Megatron alone cannot train in a layout, or gives it other weights, a training on one rank
is what the others are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature
from tests.harness.feature_layouts import COMBINED, LAYOUTS, company, flags_of, host_args, why_not
from tests.harness.rows import options_of, ranks_of
from tests.harness.training import DRIFT, FIRST_NORM, Trainer, fault

STEPS, FROZEN_STEPS = 3, 2
# Seconds.
TIMEOUT = 200
# Moments in fp8 are another training; its losses stay near.
DEVIATION = 2.0**-5
# Of the rank that such a layout is compared with.
REFERENCES = {"context": "by_name layers4 slow", "V": "by_name layers4 micro4 slow"}
# Where the first layout that a feature fits leaves it nothing to do.
EXERCISED = {
    "bias_dropout_fusion": "biases",
    "context_parallel_algo": "context",
    "grad_reduce_compression": "overlapped",
    "moe_router_fusion": "router in fp32",
    "schedules_method": "V",
    "use_fused_embedding": "tensor",
}
# So that it has something to do, whatever it measures.
MORE_FLAGS: dict[str, dict[str, Any]] = {
    "balanced_moe_experts": {"balanced_moe_break_even": 0.0},
    "grad_reduce_compression": {"grad_reduce_compression": "int8"},
    "enable_expert_placement": {"expert_placement_freq": 1, "expert_placement_break_even": 0.0},
}
_CLASSES = ("bitwise", "ulp", "deviation")
Steps = list[tuple[str, str]]


@dataclass
class Outcome:
    """How a feature trained: losses and gradient norms of each step as hexadecimal floats, or what failed."""

    off: Steps = field(default_factory=list)
    on: Steps = field(default_factory=list)
    idle: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    error: str = ""

    def drift(self) -> float:
        """The largest relative distance of two losses of one step; 0 without any."""
        pairs = [(float.fromhex(a), float.fromhex(b)) for (a, _), (b, _) in zip(self.off, self.on, strict=False)]
        return max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)

    def fault(self, numerics: str, first_norm: float = FIRST_NORM) -> str:
        """What is not as a feature of this class promises; "" if all is."""
        if self.error:
            return self.error
        if not self.on or len(self.on) != len(self.off):
            return f"{len(self.on)} steps with it, {len(self.off)} without"
        if self.reads:
            return f"reads from the device, which no graph can capture: {', '.join(self.reads)}"
        if self.idle:
            return f"never called: {', '.join(self.idle)}"
        if numerics == "bitwise":
            return "" if self.on == self.off else f"not the same bits: {fault(self.off, self.on, 0.0)}"
        return fault(self.off, self.on, DRIFT if numerics == "ulp" else DEVIATION, first_norm)


def numerics_of(feature: Feature) -> str:
    """The class of a feature together with those it brings."""
    return max((each.numerics for each in company(feature.name)), key=_CLASSES.index)


def layout_of(feature: Feature, release: str = "") -> str | None:
    """The layout that a feature is trained in, on that release if one is named; None if there is none."""
    choices = [EXERCISED[feature.name]] if feature.name in EXERCISED else LAYOUTS
    return next((each for each in choices if {*why_not(feature, each, release)} <= {COMBINED}), None)


def layouts(release: str) -> dict[str, list[str]]:
    """By layout, the features that a release has and that are trained in it."""
    found: dict[str, list[str]] = {}
    for each in runtime.catalogue():
        layout = layout_of(each, release)
        if layout is not None and not any(one.patches_for(release)[1] for one in company(each.name)):
            found.setdefault(layout, []).append(each.name)
    return found


def train(
    trainer: Trainer,
    layout: str,
    name: str,
    kind: str = "",
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
    strict: bool = False,
) -> Outcome:
    """Train a feature on the release of `trainer`.

    kind: of a model of which a part is frozen (`frozen.KINDS`). options: of `core_loop`, besides the layout's own.
    strict: a fallback is an error.
    """
    more: dict[str, Any] = {**(options or {}), "steps": FROZEN_STEPS if kind else steps, "frozen": kind}
    feature, own = runtime.catalogue()[name], options_of(LAYOUTS[layout])
    ranks = ranks_of(own)
    host = {
        **host_args(layout),
        "transformer_impl": "transformer_engine" if more.get("transformer_engine") else "local",
    }
    flags = {**flags_of(feature), **MORE_FLAGS.get(name, {}), "host_args": host, "strict": strict}
    given = {**own, **more, "requested": name}
    try:
        off = reference(trainer, layout, more)
        result = trainer.core("features", ranks, given, flags=flags, before="streams", timeout=TIMEOUT)
    except AssertionError as error:
        lines = str(error).strip().splitlines()
        return Outcome(error=f"{lines[0]} {lines[-1]}")
    called = set.union(*(result.operators(rank) for rank in range(ranks)))
    # A model that is frozen may leave it nothing to do.
    idle = () if kind or called & set(feature.operators) else tuple(feature.operators)
    on = result.steps(_with_losses(ranks, layout))
    # A frozen model trains for too few steps to round differently.
    is_idle = not kind and numerics_of(feature) == "deviation" and on == off
    reads = {place for rank in range(ranks) for place in result.synchronizations(rank)}
    is_captured = not any("cuda_graph_impl" in each.conflicting_args for each in company(name))
    return Outcome(off, on, ("anything",) if is_idle else idle, tuple(sorted(reads)) if is_captured else ())


def reference(trainer: Trainer, layout: str, options: dict[str, Any]) -> Steps:
    """Losses and gradient norms of the layout without a feature, with `options` of `core_loop` besides its own."""
    own = options_of(REFERENCES.get(layout, LAYOUTS[layout]))
    return trainer.core("device", ranks_of(own), {**own, **options}, timeout=TIMEOUT).steps()


def _with_losses(ranks: int, layout: str) -> int:
    """The rank that has the losses: the first of a V, else the last."""
    return 0 if layout == "V" else ranks - 1
