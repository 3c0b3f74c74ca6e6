"""`--recompute-in-bubble`: recomputation as steps of the pipeline schedule (ripipe).

Recomputes while the rank waits, above a bound on live activations; `--recompute-in-advance`: before each backward pass,
except on the last stage. Reaches `tensor_parallel.checkpoint`, which gets a function that has already rerun. Leaves
selective recomputation, evaluation and calls outside a schedule alone. Bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Context, Feature, Function, Option, OptionError, Override, Relation, Session

from ._shared import pipeline_execution, pipeline_orders, recompute
from ._shared.conditions import cuda_graph_args, every, several_stages

NAME = "recompute_in_bubble"
_IN_BUBBLE, _IN_ADVANCE = pipeline_orders.IN_BUBBLE, pipeline_orders.IN_ADVANCE
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_CONFLICTING_ARGS = {
    "distribute_saved_activations": "--distribute-saved-activations divides the inputs that are recomputed from",
    "num_microbatches_with_partial_activation_checkpoints": (
        "--num-microbatches-with-partial-activation-checkpoints chooses micro-batches itself"
    ),
    "fp8": "--fp8-format recomputes by Transformer Engine",
    "fp4": "--fp4-format recomputes by Transformer Engine",
    "cpu_offloading": "--cpu-offloading moves the inputs that are recomputed from",
    **cuda_graph_args("creates graphs in Megatron's own schedules alone"),
}


def _checkpoint(wrapped: Function, session: Session) -> Function:
    units = pipeline_execution.recomputed_units(session)

    def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
        return units.checkpoint(wrapped, function, (distribute_saved_activations,), args)

    return checkpoint


def _why_not(context: Context) -> list[str]:
    settings = context.settings
    if settings[_IN_BUBBLE] and settings[_IN_ADVANCE]:
        raise OptionError(f"{NAME}: --recompute-in-bubble and --recompute-in-advance: leave one out.")
    # A custom order is checked when it is made.
    is_own = ":" in (settings.get(pipeline_orders.SCHEDULE) or "")
    if settings[_IN_BUBBLE] and pipeline_orders.delays_weight_gradients(settings) and not is_own:
        raise OptionError(
            f"{NAME}: --recompute-in-bubble: {pipeline_orders.name_of(settings)} fills the bubble with weight "
            "gradients: take 1f1b or interleaved."
        )
    if context.host_args is None:
        return []
    if settings[_IN_ADVANCE] and context.arg("recompute_granularity", None) != "full":
        return ["--recompute-in-advance: nothing is recomputed: add --recompute-granularity full"]
    return []


def _arguments(context: Context) -> Mapping[str, Any]:
    if not context.settings[_IN_BUBBLE] or context.host_args is None:
        return {}
    given = context.arg("recompute_granularity", None)
    if given is not None:
        raise OptionError(
            f"{NAME}: --recompute-in-bubble chooses what is recomputed: leave out --recompute-granularity {given}"
            + (", or take --recompute-in-advance." if given == "full" else ".")
        )
    return _FULL


FEATURE = Feature(
    name=NAME,
    summary="recomputation as steps of the pipeline schedule, which run while a rank waits",
    options=(
        Option("--recompute-in-bubble"),
        Option(
            "--recompute-in-advance", help="Recompute a micro-batch before its gradient arrives from the next stage."
        ),
    ),
    numerics="bitwise",
    theme="memory",
    unsupported=pipeline_orders.UNSUPPORTED,
    condition=every(several_stages("one rank has no bubble"), _why_not),
    enabled=lambda settings: bool(settings.get(_IN_BUBBLE) or settings.get(_IN_ADVANCE)),
    conflicting_args=_CONFLICTING_ARGS,
    requires=(Relation(pipeline_orders.SCHEDULE, "it executes the steps"),),
    conflicts=(Relation("swap_attention", "it moves the activations that are recomputed here"),),
    not_auto=recompute.NOT_AUTO,
    arguments=_arguments,
    memory="not predicted by features: `mindspeed-lite schedule` predicts the order",
    patches=(Override("megatron.core.tensor_parallel.random:checkpoint", _checkpoint),),
)
