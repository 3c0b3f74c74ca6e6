"""Reasons of a feature's condition: conflicting arguments, flags without effect, Transformer Engine, YAML defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Option, OptionError, Settings

# Megatron arguments with their reasons: `Feature.conflicting_args`.
CUDA_GRAPH_ARGS = {
    "enable_cuda_graph": "--enable-cuda-graph records a layer once",
    "external_cuda_graph": "--external-cuda-graph records a layer once",
    "cuda_graph_impl": "--cuda-graph-impl records a layer once",
}
# Until 0.13 Megatron's own FSDP is `custom`.
FSDP_ARGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
SINGLE_STAGE = "--pipeline-model-parallel-size 1"


def holding(reasons: Mapping[str, Any]) -> list[str]:
    """The reasons whose values are true."""
    return [reason for reason, holds in reasons.items() if holds]


def transformer_engine_reasons(context: Context, has: str) -> list[str]:
    """The reason of a feature for the local implementation; `has`: what Transformer Engine has instead."""
    is_used = context.arg("transformer_impl", "local") == "transformer_engine"
    return [f"--transformer-impl transformer_engine {has}"] if is_used else []


def single_stage_reasons(context: Context, why: str) -> list[str]:
    """The reason of a feature for pipelines of several ranks."""
    is_single = context.host_args is not None and (context.arg("pipeline_model_parallel_size", 1) or 1) == 1
    return [f"{SINGLE_STAGE}: {why}"] if is_single else []


def fsdp_reasons(context: Context, why: str) -> list[str]:
    """One reason for each FSDP flag that is given."""
    return [f"--{name.replace('_', '-')} {why}" for name in FSDP_ARGS if context.arg(name, False)]


def conflict_reasons(conflicting_args: Mapping[str, str], value_of: Callable[[str], Any]) -> list[str]:
    """The reasons of those arguments that are set.

    Args:
        conflicting_args: reasons by Megatron's name of the argument.
        value_of: its value, from arguments or from a configuration.
    """
    return [why for name, why in conflicting_args.items() if value_of(name) not in (None, False, "none")]


def config_reasons(conflicting_args: Mapping[str, str], config: Any) -> list[str]:
    """The same for a model's configuration, which may be built without a script's arguments."""
    return conflict_reasons(conflicting_args, lambda name: getattr(config, name, None))


def given_flags(options: Iterable[Option], settings: Settings) -> list[str]:
    """Flags with another value than their default, as written on a command line."""
    found = []
    for option in options:
        value = settings.get(option.dest)
        if value is not None and value != option.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            found.append(option.flag if option.is_switch else f"{option.flag} {shown}")
    return found


def require_first(options: Sequence[Option], settings: Settings) -> None:
    """Raise OptionError if flags are given that have no effect without the first one."""
    first, *others = options
    if not settings.get(first.dest) and (given := given_flags(others, settings)):
        raise OptionError(f"{' '.join(given)} has no effect without {first.flag}: add it")


def explicitly_disabled_reasons(context: Context, argument: str, flag: str) -> list[str]:
    """Why the user does not want a fusion: `flag`, which makes `argument` false, or a YAML file."""
    reasons = []
    if argument in context.explicit and not context.arg(argument, True):
        reasons.append(f"{flag} is given")
    if any(getattr(part, argument, True) is False for part in _yaml_sections(context)):
        reasons.append(f"`{argument}` is false in the arguments of the YAML file, which this flag does not change")
    return reasons


def reenable_default(context: Context, argument: str) -> Mapping[str, Any]:
    """Megatron's `argument` as true again, unless a YAML file decides or there are no arguments.

    It may have been switched off for lack of what the feature supplies.
    """
    return {} if context.host_args is None or _yaml_sections(context) else {argument: True}


def _yaml_sections(context: Context) -> list[Any]:
    from mindspeed_lite.platform import megatron

    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
