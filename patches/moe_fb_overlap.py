"""`--moe-fb-overlap`: the forward pass of one micro-batch beside the backward pass of another.

Tokens are dispatched and combined while the other micro-batch computes: attention beside the combine's backward
exchange, weight gradients beside the dispatch, experts beside the dispatch's backward exchange. Megatron has had that
schedule since 0.14 (`--overlap-moe-expert-parallel-comm`), without Transformer Engine too. It hides little without
weight gradients that wait, which it has for Transformer Engine alone. MindSpeed's flag turns both on: this sets
Megatron's argument before validation, and turns on `delay_wgrad_compute`, whose linear layers are those of the local
implementation.

Reaches `TransformerLayerSchedulePlan.run`, which gets layers whose parts issue messages as soon as what they read is
there, and `ScheduleNode.default_backward_func`, which asks every output of a part for a gradient: behind frozen weights
some need none. Leaves the schedule of micro-batches and every computation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, Override, Session

from ._shared import combined_schedule, early_issue
from ._shared.combined_schedule import ARGUMENT


def _why_not(context: Context) -> Sequence[str]:
    # In Python the configuration says what its owner has set, when the model is built.
    return [] if context.host_args is None else combined_schedule.why_not(context)


def _arguments(context: Context) -> Mapping[str, Any]:
    return {} if context.host_args is None else {ARGUMENT: True}


def _backward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def default_backward_func(self: Any, outputs: Any, output_grad: Any) -> Any:
        pairs = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
        if pairs:
            wrapped(self, *zip(*pairs, strict=True))
        return output_grad

    return default_backward_func


FEATURE = Feature(
    name="moe_fb_overlap",
    summary="experts' exchange behind the computation of another micro-batch",
    options=(
        Option(
            "--moe-fb-overlap",
            help="Run the forward pass of one micro-batch beside the backward pass of another.",
        ),
    ),
    numerics="ulp",
    theme="experts",
    unsupported=combined_schedule.UNSUPPORTED,
    condition=_why_not,
    not_auto="two micro-batches are under way at once, which takes memory: enable it explicitly with its flag",
    arguments=_arguments,
    patches=(
        early_issue.PATCH,
        Override("megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func", _backward),
    ),
)
