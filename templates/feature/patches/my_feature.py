"""`--my-feature`: EDIT: what it does to a training, in one clause.

EDIT: Reaches `divide`: which calls pass through it. Why this symbol: it changes least between releases.
Leaves alone what it does not touch. Falls back, with a reason, for calls that it cannot serve.
"""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Feature, Function, Override, Session

from ._shared.conditions import local

TARGET = "megatron.core.utils:divide"


def _divide(wrapped: Function, session: Session) -> Function:
    def divide(numerator: Any, denominator: Any) -> Any:
        if denominator == 1:
            session.fallback(FEATURE.name, "there is nothing to divide by")
            return wrapped(numerator, denominator)
        return wrapped(numerator, denominator)

    return divide


FEATURE = Feature(
    name="my_feature",
    summary="EDIT: what it does, in one line",
    numerics="bitwise",
    theme="operators",
    memory="none: it keeps what Megatron keeps",
    condition=local("has its own"),
    patches=(Override(TARGET, _divide),),
)
