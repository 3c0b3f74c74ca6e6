"""`--pipeline-schedule`: the order of passes as data, generated, checked and executed.

`1f1b` and `interleaved` are Megatron's orders, `zb-h1` and `zb-auto` split off weight gradients, FILE.py:function is
custom. Reaches `get_forward_backward_func`, and runs Megatron's passes, messages and reductions in that order. Leaves
training without a pipeline alone. Falls back for overlapped expert communication, several modules, other tensor shapes,
and recorded graphs.
"""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, OptionError, Session
from mindspeed_lite.engine.feature import conflict_reasons
from mindspeed_lite.platform import megatron

from . import delay_wgrad_compute, moe_fb_overlap
from ._shared import pipeline_orders
from ._shared.conditions import config_reasons, cuda_graph_args, several_stages
from ._shared.pipeline_execution import ExecutorState, execute, listed
from ._shared.wrappers import parameters

NAME = pipeline_orders.SCHEDULE
_PIPELINED = ("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving")
# Only DualPipeV supports it.
_COMBINED = {moe_fb_overlap.ARGUMENT: "--overlap-moe-expert-parallel-comm has a schedule of its own"}
_is_pipeline = several_stages("one rank has nothing to schedule")
_LEFT_TO_MEGATRON = {
    "moe_paged_stash": "--moe-paged-stash counts the micro-batches of Megatron's schedule",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading counts those of Megatron's schedule",
    "use_ring_exchange_p2p": "--use-ring-exchange-p2p exchanges tensors in Megatron's order alone",
    **cuda_graph_args("creates graphs in Megatron's own schedules alone"),
}


def _choose(wrapped: Function, session: Session) -> Function:
    made: dict[Any, Function] = {}

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        function = wrapped(*args, **kwargs)
        if function.__name__ not in _PIPELINED:
            return function
        if function not in made:
            made[function] = _executing(function, session)
        return made[function]

    return get_forward_backward_func


def _executing(original: Function, session: Session) -> Function:
    from megatron.core.pipeline_parallel import schedules

    state = session.state(NAME, lambda: ExecutorState(session))

    @functools.wraps(original)
    def forward_backward(**given: Any) -> Any:
        # A training loop may hold this function after the session. Megatron refuses unknown arguments.
        if not state.is_on or not given.keys() <= parameters(original):
            return original(**given)
        settings = pipeline_orders.active_settings(session)
        if pipeline_orders.name_of(settings) is None:
            session.fallback(NAME, "the feature whose order it would execute was skipped")
            return original(**given)
        is_v = bool(settings.get(pipeline_orders.METHOD))
        config = schedules.get_model_config(listed(given["model"])[0])
        reasons = config_reasons(_LEFT_TO_MEGATRON if is_v else {**_COMBINED, **_LEFT_TO_MEGATRON}, config)
        reasons += _call_reasons(given)
        if reasons:
            if is_v:
                raise OptionError(f"{pipeline_orders.METHOD}: the model is placed in a V: {'; '.join(reasons)}")
            session.fallback(NAME, "; ".join(reasons))
            return original(**given)
        return execute(session, state, settings, config, **given)

    return forward_backward


def _call_reasons(given: dict[str, Any]) -> list[str]:
    reasons = []
    if given.get("adjust_tensor_shapes_fn") is not None:
        reasons.append("adjust_tensor_shapes_fn: tensors between stages have shapes of their own")
    communicator, groups = given.get("p2p_communicator"), given.get("pg_collection", given.get("grad_finalize_pgs"))
    if communicator is not None and type(communicator).__name__ != "P2PCommunicator":
        reasons.append(f"{type(communicator).__name__}: several modules exchange tensors")
    if (communicator is None) is not (groups is None):
        reasons.append("p2p_communicator and pg_collection are given one without the other")
    return reasons


def _why_not(context: Context) -> list[str]:
    settings, name = context.settings, pipeline_orders.name_of(context.settings)
    if name is None and not settings.get("pipeline_schedule_trace"):
        return []
    if name is None:
        raise OptionError(f"{NAME}: --pipeline-schedule-trace records an order: name it with --pipeline-schedule.")
    is_bounded = name == pipeline_orders.AUTOMATIC or settings.get(pipeline_orders.IN_BUBBLE)
    if settings.get("pipeline_schedule_max_live") is not None and not is_bounded:
        raise OptionError(
            f"{NAME}: --pipeline-schedule-max-live bounds zb-auto and --recompute-in-bubble, not {name}: leave one out."
        )
    if context.host_args is None:
        return []
    if reasons := _is_pipeline(context):
        return reasons
    if not settings.get(pipeline_orders.METHOD) and (left := conflict_reasons(_COMBINED, context.arg)):
        return left
    if pipeline_orders.delays_weight_gradients(settings):
        delay, release = delay_wgrad_compute.FEATURE, context.versions.get(megatron.HOST)
        assert delay.condition is not None
        found = delay.patches_for(release)[1] if release else []
        if found := [*found, *delay.conflict_reasons(context.arg), *delay.condition(context)]:
            return found
    pipeline_orders.check_layout(context)
    return []


FEATURE = Feature(
    name=NAME,
    summary="the order of passes in a pipeline as data: Megatron's, zero-bubble, or your own",
    options=(
        Option(
            "--pipeline-schedule",
            help="The order of passes: 1f1b, interleaved, zb-h1, zb-auto, or FILE.py:function.",
            default=None,
            type=pipeline_orders.parse_name,
            on=pipeline_orders.AUTOMATIC,
            metavar="ORDER",
        ),
        Option.count(
            "--pipeline-schedule-max-live",
            "zb-auto, --recompute-in-bubble: the most chunk activations a rank holds (ranks times chunks).",
        ),
        Option(
            "--pipeline-schedule-trace",
            help="Write what each rank has executed, and when, to FOLDER/rankN.jsonl.",
            default=None,
            metavar="FOLDER",
        ),
    ),
    numerics="bitwise",
    theme="communication",
    unsupported=pipeline_orders.UNSUPPORTED,
    condition=_why_not,
    enabled=lambda settings: bool(pipeline_orders.name_of(settings) or settings.get("pipeline_schedule_trace")),
    conflicting_args=_LEFT_TO_MEGATRON,
    not_auto="Megatron's own schedule runs the same orders: choose another with its flag",
    patches=(Around("megatron.core.pipeline_parallel.schedules:get_forward_backward_func", _choose),),
)
