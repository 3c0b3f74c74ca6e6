"""Fusions of Megatron's that are on by default and that a feature of ours supplies: whether a user has said no."""

from __future__ import annotations

from collections.abc import Mapping
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


def kept_on(context: Context, argument: str) -> Mapping[str, Any]:
    """Megatron's `argument` as true again, which may have been switched off for lack of what the feature supplies.

    Nothing without the script's arguments, and nothing with a YAML file, which decides itself.
    """
    return {} if context.host_args is None or sections(context) else {argument: True}


def sections(context: Context) -> list[Any]:
    """Where the arguments of a YAML file have the model's fields."""
    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
