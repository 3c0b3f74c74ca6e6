"""Whether a user has said no to a fusion of Megatron's that is on by default and that a feature of ours supplies."""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Context
from mindspeed_lite.platform import megatron


def refused(context: Context, argument: str, flag: str) -> list[str]:
    """The reasons: `flag`, by which Megatron's `argument` becomes false, or a YAML file that says so."""
    reasons = []
    if argument in context.explicit and not context.arg(argument, True):
        reasons.append(f"{flag} is given")
    if any(getattr(part, argument, True) is False for part in sections(context)):
        reasons.append(f"`{argument}` is false in the arguments of the YAML file, which this flag does not change")
    return reasons


def sections(context: Context) -> list[Any]:
    """Where the arguments of a YAML file have the model's fields."""
    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
