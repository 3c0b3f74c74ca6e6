"""Adapts to Megatron's pipeline functions across releases, recognised by their parameters.

Before 0.14 process groups come from `parallel_state` and messages are module functions; before 0.13 the virtual stage
is global.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from mindspeed_lite.engine import Function

_MESSAGES = (
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)


@functools.cache
def parameters(function: Function) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def filter_kwargs(function: Function, **given: Any) -> dict[str, Any]:
    names = parameters(function)
    return given if given.keys() <= names else {name: value for name, value in given.items() if name in names}


def tensor_shape_kwargs(schedules: Any, tp: Any, cp: Any, rank: int) -> dict[str, Any]:
    if "tp_group" in parameters(schedules.get_tensor_shapes):
        return {"tp_group": tp, "cp_group": cp}
    return {"rank": rank, "model_type": None, "encoder_decoder_xattn": False}


def finalize_kwargs(schedules: Any, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
    schedule = schedules.forward_backward_pipelining_without_interleaving
    if groups is None:
        return filter_kwargs(schedule, force_all_reduce=force_all_reduce)
    return filter_kwargs(schedule, force_all_reduce=force_all_reduce, pg_collection=groups, grad_finalize_pgs=groups)


def unsupported_reasons(schedules: Any, model: Any) -> list[str]:
    """Why the model has several tensors per message or several pipelines."""
    if "model_type" not in parameters(schedules.get_tensor_shapes):
        return []
    reasons = []
    if schedules.get_model_type(model) is schedules.ModelType.encoder_and_decoder:
        reasons.append("an encoder with a decoder: its stages exchange two tensors")
    if isinstance(schedules.parallel_state.get_pipeline_model_parallel_group(), list):
        reasons.append("the encoder has another tensor parallel size: a rank is in several pipelines")
    return reasons


def in_stage(schedules: Any, chunk: int | None, function: Function) -> Function:
    """Set Megatron's global virtual stage before the call if passes take no such argument."""
    if chunk is None or "vp_stage" in parameters(schedules.forward_step):
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        schedules.parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        return function(*args, **kwargs)

    return called


def communicator(schedules: Any, group: Any, config: Any) -> Any:
    """Megatron's communicator, or its message functions under the same names."""
    if hasattr(schedules, "P2PCommunicator"):
        return schedules.P2PCommunicator(pp_group=group, config=config)
    return FunctionCommunicator(schedules.p2p_communication, group, config)


class FunctionCommunicator:
    """Message functions before 0.14."""

    def __init__(self, functions: Any, group: Any, config: Any) -> None:
        self.pp_group = group
        for name in _MESSAGES:
            setattr(self, name, functools.partial(getattr(functions, name), config=config))
