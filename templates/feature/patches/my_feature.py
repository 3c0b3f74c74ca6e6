"""`--my-feature`: what it does to a training, in one clause.

Reaches `divide`: which calls pass through it. Why this symbol: it changes least between releases.
Leaves alone what it does not touch. Falls back, with a reason, for calls that it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, Override, Session

TARGET = "megatron.core.utils:divide"


def _divide(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def divide(numerator: Any, denominator: Any) -> Any:
        if denominator == 1:
            session.fallback(FEATURE.name, "there is nothing to divide by")
            return wrapped(numerator, denominator)
        return wrapped(numerator, denominator)

    return divide


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine has its own")
    return reasons


FEATURE = Feature(
    name="my_feature",
    summary="what it does, in one line",
    options=(Option("--my-feature", help="What it does, as a command."),),
    numerics="bitwise",
    theme="operators",
    memory="none: it keeps what Megatron keeps",
    condition=_why_not,
    patches=(Override(TARGET, _divide),),
)
