"""Layouts in which every feature of the catalogue is trained and undone, its flags there, and why one does not fit."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Feature, Option, OptionError, Settings
from mindspeed_lite.patches import moe_fb_overlap
from mindspeed_lite.platform.megatron import HOST
from tests.harness import core_loop
from tests.harness.rows import options_of

_EXPERTS = "experts4 first_dense"
_OVERLAPPED = f"{_EXPERTS} ep2 dist overlap_grad overlap_gather no_sync"
# In the words of `rows`; a feature is undone in the first one that fits.
UNDONE = {
    "plain": "",
    "LayerNorm": "dist layernorm qk_l2_norm",
    "experts": f"{_EXPERTS} dist",
    "delayed": f"{_EXPERTS} overlap_grad ddp_delayed no_sync",
    "tensor": f"{_EXPERTS} dist tp2 sp ep2 etp1",
    "overlapped": _OVERLAPPED,
    "gathered": f"{_OVERLAPPED} allgather shared",
}
# Trained without being undone: a step of a pipeline cannot be cut in pieces, and Megatron's own attention takes no part
# of a context.
LAYOUTS = {
    **UNDONE,
    "biases": "bias sums",
    "context": "cp2 by_name layers4 slow",
    "pipeline": "pp2 dist",
    "V": "pp2 vpp2 by_name layers4 slow",
    "shared experts": f"{_EXPERTS} shared",
    "router in fp32": f"{_EXPERTS} dist router_fp32",
    "recomputed": "pp2 vpp2 layers8 full_block3",
}
# What a script's arguments say that no configuration here takes.
_ARGUMENTS: dict[str, dict[str, Any]] = {"delayed": {"overlap_moe_expert_parallel_comm": True}}
# Of options that take a text.
_VALUES = {"FILE": os.devnull, "ORDER": "1f1b"}
# Flags that a feature needs besides its own in one process.
_MORE = {"moe_hierarchical_alltoallv": {"moe_node_size": 1}, "adaptive_memory": {"memory_budget": 1.0}}
# Why a feature is not undone here, though it can be trained.
COMBINED = "Megatron's combined schedule, which it turns on, leaves its own marks in a model"


def host_args(layout: str) -> dict[str, Any]:
    """What Megatron's arguments would be for a training in this layout."""
    options = options_of(LAYOUTS[layout])
    return {
        "transformer_impl": "local",
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": options.get("tp", 1),
        "pipeline_model_parallel_size": options.get("pp", 1),
        "virtual_pipeline_model_parallel_size": options.get("vpp"),
        "context_parallel_size": options.get("cp", 1),
        "expert_model_parallel_size": options.get("ep", 1),
        "expert_tensor_parallel_size": options.get("etp"),
        "sequence_parallel": options.get("sp", False),
        "num_experts": options.get("experts"),
        "moe_token_dispatcher_type": "alltoall",
        "use_distributed_optimizer": options.get("distributed_optimizer", False),
        "overlap_param_gather": options.get("overlap_param_gather", False),
        "overlap_grad_reduce": options.get("overlap_grad_reduce", False),
        "seq_length": core_loop.SEQUENCE,
        "bf16": True,
        "swiglu": True,
        "qk_l2_norm": options.get("qk_l2_norm", False),
        "add_bias_linear": options.get("bias", False),
        "optimizer": "adam",
        **options.get("config", {}),
        **options.get("moe", {}),
        **_ARGUMENTS.get(layout, {}),
    }


def flags_of(feature: Feature) -> dict[str, Any]:
    """Flags that turn a feature on, with those of the features it requires or works with alone."""
    return _flags(company(feature.name))


def _flags(features: Sequence[Feature]) -> dict[str, Any]:
    """Flags that turn all of them on; one that another's flag turns on needs none."""
    found: dict[str, Any] = {}
    for each in reversed(features):
        if not each.is_enabled(_settings(found)):
            found[each.options[0].dest] = _value(each.options[0])
            found.update(_MORE.get(each.name, {}))
    return found


def _settings(flags: dict[str, Any]) -> Settings:
    return Settings.of((*runtime.GENERAL, *runtime.catalogue().options()), flags)


def _value(option: Option) -> Any:
    """What turns a feature on that has it as its first option."""
    if option.choices is not None:
        return option.choices[-1]
    if option.nargs is not None:
        return ["all"]
    if option.metavar in _VALUES:
        return _VALUES[option.metavar]
    return option.default + 1 if isinstance(option.default, int) and not option.is_switch else True


@functools.cache
def company(name: str) -> list[Feature]:
    """The feature after those it requires, and one more where its condition asks for that in every layout."""
    features = runtime.catalogue()
    required = [*(features[each.feature] for each in features[name].requires), features[name]]
    others = [[]] + [[each] for each in features if each.options[0].is_switch and each not in required]
    found = ([*more, *required] for more in others if any(not _reasons([*more, *required], each) for each in UNDONE))
    return next(found, required)


def _reasons(features: list[Feature], layout: str, release: str = "") -> list[str]:
    given = host_args(layout)
    versions = {HOST: release} if release else {}
    context = Context(_settings(_flags(features)), "cpu", versions, SimpleNamespace(**given))
    reasons: list[str] = []
    for each in features:
        reasons += each.conflict_reasons(given.get)
        with emulated_devices():
            try:
                reasons += each.condition(context) if each.condition is not None else ()
            except OptionError as error:
                reasons.append(str(error))
        # Arguments that a script's parser sets: there is nothing to undo.
        reasons += [] if each.patches else ["it swaps nothing"]
        if moe_fb_overlap.ARGUMENT in (each.arguments(context) if each.arguments is not None else {}):
            reasons.append(COMBINED)
    return reasons


def why_not(feature: Feature, layout: str, release: str = "") -> list[str]:
    """Why a feature cannot be had in a layout, of that release if one is named; [] if it can."""
    return _reasons(company(feature.name), layout, release)


@contextlib.contextmanager
def emulated_devices() -> Iterator[None]:
    """As if the device had what `simulated.streams` puts in its place; nothing of it stays."""
    asked = {
        "swap_optimizer": "_no_copy_engine",
        "swap_attention": "_why_not_here",
        "moe_wgrad_side_stream": "_why_not_here",
    }
    with contextlib.ExitStack() as stack:
        for patch, name in asked.items():
            stack.enter_context(mock.patch(f"mindspeed_lite.patches.{patch}.{name}", lambda device: []))
        yield
