"""Lists Megatron arguments that a feature cannot work with, each with its reason.

A table maps Megatron's name of an argument, which is also that of the field of its configuration, to the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_lite.engine import Context

CUDA_GRAPH_ARGS = {
    "enable_cuda_graph": "--enable-cuda-graph records a layer once",
    "external_cuda_graph": "--external-cuda-graph records a layer once",
    "cuda_graph_impl": "--cuda-graph-impl records a layer once",
}

# Until 0.13 Megatron's own one has another name.
FSDP_ARGS = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")


def fsdp_reasons(context: Context, why: str) -> list[str]:
    """One reason for each flag given that asks for FSDP: the flag, and `why`."""
    return [f"--{name.replace('_', '-')} {why}" for name in FSDP_ARGS if context.arg(name, False)]


def conflict_reasons(conflicting_args: Mapping[str, str], value_of: Callable[[str], Any]) -> list[str]:
    """The reasons of those arguments in the table that are set.

    Args:
        conflicting_args: reasons by Megatron's name of the argument.
        value_of: the value under such a name, from arguments or from a configuration.
    """
    return [why for name, why in conflicting_args.items() if value_of(name) not in (None, False, "none")]
