"""Conditions of features, composed with `every`, and reasons that depend on arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_lite.engine import Context
from mindspeed_lite.engine.feature import conflict_reasons

Condition = Callable[[Context], list[str]]

_CUDA_GRAPH_FLAGS = ("--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-impl")


def cuda_graph_args(why: str) -> dict[str, str]:
    """Conflicting arguments for CUDA graphs; why: the reason against capture."""
    return {each[2:].replace("-", "_"): f"{each} {why}" for each in _CUDA_GRAPH_FLAGS}


CUDA_GRAPH_ARGS = cuda_graph_args("replays kernels without the Python code that this needs in every call")
# Up to 0.13 Megatron FSDP is called `custom`.
FSDP_ARGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")


def every(*conditions: Condition) -> Condition:
    return lambda context: [reason for each in conditions for reason in each(context)]


def has_te_layers(context: Context) -> bool:
    """Whether layers are Transformer Engine's."""
    return bool(context.arg("transformer_impl", "local") == "transformer_engine")


def local(theirs: str) -> Condition:
    """Condition for the local implementation; `theirs`: what Transformer Engine does instead."""
    return lambda context: [f"--transformer-impl transformer_engine {theirs}"] if has_te_layers(context) else []


def needs(argument: str, why: str) -> Condition:
    """An argument that is set, where Megatron's arguments are known."""

    def condition(context: Context) -> list[str]:
        is_missing = context.decides(argument) and not context.arg(argument, None)
        return [f"{flag(argument)} is not given: {why}"] if is_missing else []

    return condition


def above_one(argument: str, why: str) -> Condition:
    """Several ranks along a dimension, where Megatron's arguments are known."""

    def condition(context: Context) -> list[str]:
        is_one = context.host_args is not None and (context.arg(argument, 1) or 1) == 1
        return [f"{flag(argument)} 1: {why}"] if is_one else []

    return condition


def several_stages(why: str) -> Condition:
    return above_one("pipeline_model_parallel_size", why)


def not_disabled(argument: str, flag: str) -> Condition:
    """A fusion that the user has not disabled by `flag`, which clears `argument`, or by YAML."""

    def condition(context: Context) -> list[str]:
        is_cleared = argument in context.explicit and not context.arg(argument, True)
        reasons = [f"{flag} is given"] if is_cleared else []
        if any(getattr(part, argument, True) is False for part in _yaml_sections(context)):
            reasons.append(f"`{argument}` is false in the arguments of the YAML file, which this flag does not change")
        return reasons

    return condition


def flag(argument: str) -> str:
    return "--" + argument.replace("_", "-")


def fsdp_args(why: str) -> dict[str, str]:
    return {name: f"{flag(name)} {why}" for name in FSDP_ARGS}


def holding(reasons: Mapping[str, Any]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def config_reasons(conflicting_args: Mapping[str, str], config: Any) -> list[str]:
    return conflict_reasons(conflicting_args, lambda name: getattr(config, name, None))


def turn_on(argument: str) -> Callable[[Context], Mapping[str, Any]]:
    return lambda context: {} if context.host_args is None else {argument: True}


def reenable_default(argument: str) -> Callable[[Context], Mapping[str, Any]]:
    """Set `argument` to True again, unless YAML or a Python caller decides.

    Megatron may have cleared it because a package is missing.
    """
    return lambda context: {} if context.host_args is None or _yaml_sections(context) else {argument: True}


def _yaml_sections(context: Context) -> list[Any]:
    from mindspeed_lite.platform import megatron

    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
