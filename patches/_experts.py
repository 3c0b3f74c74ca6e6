"""What the features for mixtures of experts share: when one of them makes sense, and the argument that turns it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_lite.engine import Context


def why_not(theirs: str) -> Callable[[Context], list[str]]:
    """The condition of a feature beside whose place Transformer Engine has `theirs`."""

    def reasons(context: Context) -> list[str]:
        found = []
        if context.arg("transformer_impl", "local") == "transformer_engine":
            found.append(f"--transformer-impl transformer_engine has {theirs} of its own")
        if context.host_args is not None and not context.arg("num_experts", None):
            found.append("--num-experts is not given: the model has no experts")
        return found

    return reasons


def turn_on(argument: str) -> Callable[[Context], Mapping[str, Any]]:
    """Sets Megatron's own argument, by which its configuration asks for the fused form."""

    def adjust(context: Context) -> Mapping[str, Any]:
        return {} if context.host_args is None else {argument: True}

    return adjust
