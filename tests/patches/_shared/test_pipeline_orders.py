"""Which order the flags ask for, and what does not fit them."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, OptionError, Report, Session, Settings
from mindspeed_lite.patches._shared import pipeline_orders
from mindspeed_lite.pipeline.check import ScheduleError
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Kind


def settings(pipeline_schedule=None, **more):
    off = {"pipeline_schedule_max_live": None, "schedules_method": None}
    return Settings({"pipeline_schedule": pipeline_schedule, **off, **more})


@pytest.mark.parametrize(
    ("flags", "key", "order", "without"),
    [
        ({"schedules_method": "dualpipev"}, pipeline_orders.PLACED, "dualpipev-whole", None),
        ({"recompute_in_advance": True}, pipeline_orders.RECORDED, "megatron's", None),
        ({"pipeline_schedule": "zb-h1", "recompute_in_bubble": True}, pipeline_orders.RECORDED, "zb-h1", "zb-h1"),
    ],
)
def test_flags_of_a_skipped_feature_ask_for_nothing(flags, key, order, without):
    given = settings(**flags)
    session = Session(given, Context(given, "cpu", {}), Report({}, "cpu"))
    assert pipeline_orders.name_of(pipeline_orders.active_settings(session)) == without
    assert not pipeline_orders.recomputes_in_steps(pipeline_orders.active_settings(session))
    feature = session.of("of its own")
    feature.state(key, object)
    assert pipeline_orders.active_settings(session) is given and pipeline_orders.name_of(given) == order
    feature.end()
    assert pipeline_orders.name_of(pipeline_orders.active_settings(session)) == without


def test_which_orders_have_weight_gradients_of_their_own():
    asked = [pipeline_orders.delays_weight_gradients(settings(name)) for name in (None, "1f1b", "interleaved", "zb-h1")]
    assert asked == [False, False, False, True]
    assert not pipeline_orders.delays_weight_gradients(settings(schedules_method="dualpipev"))
    for more in ("use_gradient_accumulation_fusion", "mindspeed_lite_auto", "dualpipev_dw_detach"):
        assert pipeline_orders.delays_weight_gradients(settings(schedules_method="dualpipev", **{more: True}))


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("1f1b", {"virtual_pipeline_model_parallel_size": 2}, "leave out --num-virtual-stages"),
        ("zb-h1", {"num_virtual_stages_per_pipeline_rank": 3}, "3 are asked for"),
        ("interleaved", {}, "add --num-virtual-stages"),
    ],
)
def test_another_number_of_chunks_is_an_error(name, args, text):
    context = Context(settings(name), "cpu", {}, args)
    with pytest.raises(OptionError, match=text):
        pipeline_orders.check_layout(context)


def test_what_megatron_has_not_derived_yet_is_no_error():
    for args in ({"num_layers_per_virtual_pipeline_stage": 1}, {"pipeline_model_parallel_layout": "Et|tL"}):
        pipeline_orders.check_layout(Context(settings("interleaved"), "cpu", {}, args))
    pipeline_orders.check_layout(Context(settings("interleaved"), "cpu", {}, None))


def test_schedules():
    found = pipeline_orders.schedule_of(settings("zb-auto"), PipelineShape(2, 4), False)
    assert any(step.kind is Kind.WEIGHT_GRAD for step in found.steps(0))
    assert pipeline_orders.schedule_of(settings("zb-auto"), PipelineShape(2, 4), True).is_forward_only
    v = settings(schedules_method="dualpipev")
    assert pipeline_orders.schedule_of(v, PipelineShape(2, 4, 2), True).placement == ((0, 3), (1, 2))
    with pytest.raises(ValueError, match="at least 3 micro-batches"):
        pipeline_orders.schedule_of(v, PipelineShape(2, 2, 2), False)


def test_an_order_of_the_users_stands_on_megatrons_placement(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from mindspeed_lite.pipeline.orders import dualpipev as mine\n"
        "from mindspeed_lite.pipeline.steps import v_placement\n"
        "mine.placement, mine.chunks = v_placement, 2\n"
    )
    with pytest.raises(ScheduleError, match="the V placement"):
        pipeline_orders.schedule_of(settings(f"{file}:mine"), PipelineShape(2, 4, 2), False)
