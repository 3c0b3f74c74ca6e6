"""Which backend serves a call of attention, and why it is not the device's own."""

from __future__ import annotations

import sys
from typing import Any

from mindspeed_lite.ops.attention import reference
from mindspeed_lite.ops.attention.spec import AttentionSpec
from mindspeed_lite.ops.dispatch import Operator

OPERATOR = Operator("attention", reference.attention)  # type: ignore[arg-type]  # two results


def module(spec: AttentionSpec) -> Any:
    """The module that serves a call: that of the implementation chosen for `attention`."""
    return reference if spec.empty else sys.modules[OPERATOR.choose(spec.case).__module__]


def fallback_reasons(spec: AttentionSpec) -> list[str]:
    """Every reason why the call would run on the reference, not on its device's backend; empty if none."""
    return OPERATOR.why_not(spec.case)
