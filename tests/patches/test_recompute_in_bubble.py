"""`--recompute-in-bubble`, `--recompute-in-advance`: when they apply, and what they set."""

from __future__ import annotations

import pytest

from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.patches._shared import pipeline_orders
from mindspeed_lite.patches.recompute_in_bubble import FEATURE
from mindspeed_lite.pipeline.check import ScheduleError
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.steps import Kind

OFF = {
    "recompute_in_bubble": False,
    "recompute_in_advance": False,
    "pipeline_schedule": None,
    "pipeline_schedule_max_live": None,
    "pipeline_schedule_trace": None,
    "schedules_method": None,
}
IN_BUBBLE, IN_ADVANCE = {"recompute_in_bubble": True}, {"recompute_in_advance": True}
FULL = {"recompute_granularity": "full"}


def settings(*given):
    return Settings({**OFF, **{name: value for each in given for name, value in each.items()}})


def context(*given, **args):
    return Context(settings(*given), "cpu", {}, {"pipeline_model_parallel_size": 2, **args})


def test_in_the_bubble_every_layer_can_be_recomputed():
    with pytest.raises(OptionError, match="or take --recompute-in-advance"):
        FEATURE.arguments(context(IN_BUBBLE, **FULL))
    with pytest.raises(OptionError, match="leave out --recompute-granularity selective"):
        FEATURE.arguments(context(IN_BUBBLE, recompute_granularity="selective"))


def test_orders():
    """Megatron's own one if none is named, with recomputations; an evaluation has none."""
    shape = PipelineShape(2, 4, 2)
    bubble = pipeline_orders.schedule_of(settings(IN_BUBBLE), shape, False)
    assert bubble.name == "interleaved+recompute-in-bubble" and len(bubble.recomputed) == 1
    tighter = pipeline_orders.schedule_of(settings(IN_BUBBLE, {"pipeline_schedule_max_live": 3}), shape, False)
    assert len(tighter.recomputed) > 1
    advance = pipeline_orders.schedule_of(settings(IN_ADVANCE), PipelineShape(2, 4), False)
    assert advance.name == "1f1b+recompute-in-advance" and len(advance.recomputed) == 4
    assert pipeline_orders.schedule_of(settings(IN_ADVANCE), shape, True).is_forward_only


def test_an_order_of_the_users_says_itself_what_is_recomputed(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from mindspeed_lite.pipeline.steps import backward, forward, recompute\n"
        "def mine(rank, shape):\n"
        "    for microbatch in range(shape.microbatches):\n"
        "        yield from (forward(0, microbatch), recompute(0, microbatch), backward(0, microbatch))\n"
    )
    own = {"pipeline_schedule": f"{file}:mine"}
    found = pipeline_orders.schedule_of(settings(own, IN_ADVANCE), PipelineShape(2, 3), False)
    assert [step.kind for step in found.steps(1)].count(Kind.RECOMPUTE) == 3
    with pytest.raises(ScheduleError, match="add --recompute-in-advance"):
        pipeline_orders.schedule_of(settings(own), PipelineShape(2, 3), False)


def test_an_order_of_the_users_with_weight_gradients_is_refused_when_it_is_made(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from mindspeed_lite.pipeline.orders import zb_h1 as mine\n")
    with pytest.raises(OrderError, match="beside weight gradients"):
        pipeline_orders.schedule_of(
            settings(IN_BUBBLE, {"pipeline_schedule": f"{file}:mine"}), PipelineShape(2, 4), False
        )
