"""`--moe-fb-overlap`: overlap one micro-batch's forward with another's backward.

Turns on Megatron's `--overlap-moe-expert-parallel-comm`, whose schedule computes one micro-batch while tokens of the
other travel, and `delay_wgrad_compute`, without which it overlaps little. Reaches `TransformerLayerSchedulePlan.run`,
the order of one pair of layers, to issue each message as soon as its input exists; and
`ScheduleNode.default_backward_func`, which must skip outputs that need no gradient. Leaves the order of micro-batches
and every computation alone.
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
