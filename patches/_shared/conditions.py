"""Reasons why a feature cannot run: conflicting arguments, flags, Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Option, OptionError, Settings

CUDA_GRAPH_ARGS = {
    "enable_cuda_graph": "--enable-cuda-graph records a layer once",
    "external_cuda_graph": "--external-cuda-graph records a layer once",
    "cuda_graph_impl": "--cuda-graph-impl records a layer once",
}
# Up to 0.13 Megatron FSDP is called `custom`.
FSDP_ARGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
SINGLE_STAGE = "--pipeline-model-parallel-size 1"


def holding(reasons: Mapping[str, Any]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def transformer_engine_reasons(context: Context, has: str) -> list[str]:
    """Reason for the local implementation; `has`: Transformer Engine's counterpart."""
    is_used = context.arg("transformer_impl", "local") == "transformer_engine"
    return [f"--transformer-impl transformer_engine {has}"] if is_used else []


def single_stage_reasons(context: Context, why: str) -> list[str]:
    is_single = context.host_args is not None and (context.arg("pipeline_model_parallel_size", 1) or 1) == 1
    return [f"{SINGLE_STAGE}: {why}"] if is_single else []


def fsdp_reasons(context: Context, why: str) -> list[str]:
    return [f"--{name.replace('_', '-')} {why}" for name in FSDP_ARGS if context.arg(name, False)]


def conflict_reasons(conflicting_args: Mapping[str, str], value_of: Callable[[str], Any]) -> list[str]:
    """Reasons of the arguments that are set.

    Args:
        conflicting_args: Megatron argument -> reason.
        value_of: argument -> value.
    """
    return [why for name, why in conflicting_args.items() if value_of(name) not in (None, False, "none")]


def config_reasons(conflicting_args: Mapping[str, str], config: Any) -> list[str]:
    return conflict_reasons(conflicting_args, lambda name: getattr(config, name, None))


def given_flags(options: Iterable[Option], settings: Settings) -> list[str]:
    found = []
    for option in options:
        value = settings.get(option.dest)
        if value is not None and value != option.default:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            found.append(option.flag if option.is_switch else f"{option.flag} {shown}")
    return found


def require_first(options: Sequence[Option], settings: Settings) -> None:
    first, *others = options
    if not settings.get(first.dest) and (given := given_flags(others, settings)):
        raise OptionError(f"{' '.join(given)} has no effect without {first.flag}: add it")


def explicitly_disabled_reasons(context: Context, argument: str, flag: str) -> list[str]:
    """Why the user disabled a fusion: by `flag`, which clears `argument`, or by YAML."""
    reasons = []
    if argument in context.explicit and not context.arg(argument, True):
        reasons.append(f"{flag} is given")
    if any(getattr(part, argument, True) is False for part in _yaml_sections(context)):
        reasons.append(f"`{argument}` is false in the arguments of the YAML file, which this flag does not change")
    return reasons


def reenable_default(context: Context, argument: str) -> Mapping[str, Any]:
    """Set `argument` to True again, unless YAML or a Python caller decides.

    Megatron may have cleared it because a package is missing.
    """
    return {} if context.host_args is None or _yaml_sections(context) else {argument: True}


def _yaml_sections(context: Context) -> list[Any]:
    from mindspeed_lite.platform import megatron

    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
