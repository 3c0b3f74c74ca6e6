"""Resolves the requested pipeline schedule and checks the model's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Context, OptionError, Session, Settings
from mindspeed_lite.pipeline import check, orders, recompute_plan, zero_bubble
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Schedule, interleaved_placement, v_placement

SCHEDULE = "pipeline_schedule"
METHOD = "schedules_method"
AUTOMATIC = "zb-auto"
IN_BUBBLE, IN_ADVANCE = "recompute_in_bubble", "recompute_in_advance"
PLACED, RECORDED = "stages in a V", "recomputed units"
UNSUPPORTED = {"<0.14": "before Megatron 0.14 passes and messages of a pipeline take no process groups"}
_MEGATRONS = "megatron's"
WHOLE = "dualpipev-whole"
# Orders on Megatron's own placement of layers.
NAMES = ("1f1b", "interleaved", "zb-h1", AUTOMATIC)
_ONE_CHUNK = ("1f1b", "zb-h1")
# Arguments from which Megatron derives the number of model chunks.
_DERIVED_FROM = ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout")


def parse_name(text: str) -> str:
    if text not in NAMES and ":" not in text:
        raise ValueError(f"one of {', '.join(NAMES)}, or an order of your own as FILE.py:function")
    return text


def name_of(settings: Mapping[str, Any]) -> str | None:
    if settings.get(METHOD) and settings.get("dualpipev_dw_detach"):
        return "dualpipev-dw-detach"
    if settings.get(METHOD):
        is_fused = settings.get("use_gradient_accumulation_fusion") or settings.get("mindspeed_lite_auto")
        return "dualpipev" if is_fused else WHOLE
    return settings.get(SCHEDULE) or (_MEGATRONS if recomputes_in_steps(settings) else None)


def active_settings(session: Session) -> Settings:
    """Settings without flags of features that were skipped."""
    settings = session.settings
    skipped: dict[str, None] = {}
    if settings.get(METHOD) and session.find(PLACED) is None:
        skipped[METHOD] = None
    if recomputes_in_steps(settings) and session.find(RECORDED) is None:
        skipped |= {IN_BUBBLE: None, IN_ADVANCE: None}
    return Settings({**settings, **skipped}) if skipped else settings


def recomputes_in_steps(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get(IN_BUBBLE) or settings.get(IN_ADVANCE))


def delays_weight_gradients(settings: Mapping[str, Any]) -> bool:
    return name_of(settings) not in (None, "1f1b", "interleaved", WHOLE, _MEGATRONS)


def chunks_of(context: Context) -> int | None:
    derived = context.arg("virtual_pipeline_model_parallel_size", None)
    given = context.arg("num_virtual_stages_per_pipeline_rank", None)
    if derived or given:
        return int(derived or given)
    is_open = context.host_args is None or any(context.arg(name, None) for name in _DERIVED_FROM)
    return None if is_open else 1


def check_layout(context: Context) -> None:
    name, chunks = name_of(context.settings), chunks_of(context)
    if name in _ONE_CHUNK and chunks is not None and chunks > 1:
        raise OptionError(
            f"{SCHEDULE}: {name} has one model chunk a rank, and {chunks} are asked for: leave out "
            f"--num-virtual-stages-per-pipeline-rank, or take interleaved or {AUTOMATIC}."
        )
    if name == "interleaved" and chunks == 1:
        raise OptionError(
            f"{SCHEDULE}: interleaved needs several model chunks a rank: add --num-virtual-stages-per-pipeline-rank 2, "
            "or take 1f1b."
        )


def schedule_of(settings: Mapping[str, Any], shape: PipelineShape, forward_only: bool) -> Schedule:
    """Schedule of a step. Raises ValueError for an impossible shape."""
    if forward_only:
        return orders.build("forward-only-v" if settings.get(METHOD) else "forward-only", shape)
    found = _base(settings, shape)
    if found.recomputed:
        return found
    if settings.get(IN_BUBBLE):
        return recompute_plan.in_bubble(found, settings.get("pipeline_schedule_max_live"))
    return recompute_plan.in_advance(found) if settings.get(IN_ADVANCE) else found


def _base(settings: Mapping[str, Any], shape: PipelineShape) -> Schedule:
    name = name_of(settings)
    assert name is not None
    if name == _MEGATRONS:
        name = "interleaved" if shape.chunks > 1 else "1f1b"
    if name == AUTOMATIC:
        return zero_bubble.automatic(shape, settings["pipeline_schedule_max_live"])
    if settings.get(METHOD) or name in NAMES:
        return orders.build(name, shape)
    schedule = check.load(name, shape)
    if schedule.recomputed and not recomputes_in_steps(settings):
        raise check.ScheduleError(
            f"{name}: it has recomputations as steps: add --recompute-in-advance or --recompute-in-bubble"
        )
    if schedule.placement != interleaved_placement(shape.ranks, shape.chunks):
        has = "the V placement" if schedule.placement == v_placement(shape.ranks) else "another one"
        raise check.ScheduleError(
            f"{name}: the model is built on Megatron's placement of stages, and the order has {has}"
        )
    return schedule
