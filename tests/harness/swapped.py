"""Whether a target is swapped now, and why a feature would not apply."""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Context, Feature, resolve
from mindspeed_lite.engine.swaps import function_in, original_of


def is_swapped(target: Any) -> bool:
    """Whether something else runs or stands there than the host's own.

    `target`: its text, or what the host has there, a raw function of a class too. A function is the same object while
    it is swapped, with other code.
    """
    raw = resolve(target).raw if isinstance(target, str) else target
    original = original_of(raw)
    if original is raw:
        return False
    now, before = function_in(raw), function_in(original)
    return now is None or before is None or now.__code__ is not before.__code__


def reasons(feature: Feature, context: Context) -> list[str]:
    """The feature's own reasons why it does not apply: arguments it conflicts with, then its condition."""
    return [*feature.conflict_reasons(context.arg), *(feature.condition(context) if feature.condition else ())]
