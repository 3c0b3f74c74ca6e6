"""Shares condition, argument adjustment and verification among the features for mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_lite.engine import Context, Feature, Session
from mindspeed_lite.verify import Exact


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


def before_call(layer: Any) -> None:
    """Wait for the parameters of a linear layer that is read and not called, as its hooks do (--overlap-param-gather).

    Hooks that are one half of a pair are left alone.
    """
    if not layer._forward_hooks:
        for hook in layer._forward_pre_hooks.values():
            hook(layer, ())


def compare(
    session: Session,
    feature: Feature,
    operator: str,
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    inputs: Mapping[str, Any],
    against: str = "Megatron's function",
    exact_in_fp64: bool = False,
    variant: str = "",
) -> None:
    """Have the session's verifier compare an operator whose number of rows each batch decides.

    exact_in_fp64: `theirs` in float64 is what both are measured by.
    """
    session.verifier.check(
        feature.name,
        operator,
        feature.numerics,
        ours,
        theirs,
        inputs,
        against=against,
        exact=[Exact(theirs)] if exact_in_fp64 else (),
        variant=variant,
        sizes_vary=True,
    )
