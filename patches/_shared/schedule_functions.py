"""What Megatron's pipeline functions of a release are told: the arguments of the newest one that this one takes too.

Releases differ in names and arguments, not in what the functions do. Before 0.14 process groups come from
`parallel_state`, messages are functions of a module, and before 0.13 the virtual stage is a global number. A release is
known by the parameters of its functions, not by its number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MESSAGES = (
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)


@functools.cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of what a function takes."""
    return frozenset(inspect.signature(function).parameters)


def taken(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Those of the arguments that a function takes."""
    names = parameters(function)
    return given if given.keys() <= names else {name: value for name, value in given.items() if name in names}


def of_tensor_shapes(schedules: Any, tp: Any, cp: Any, rank: int) -> dict[str, Any]:
    """What Megatron's shape of messages depends on besides the lengths, for a model that sends one tensor."""
    if "tp_group" in parameters(schedules.get_tensor_shapes):
        return {"tp_group": tp, "cp_group": cp}
    return {"rank": rank, "model_type": None, "encoder_decoder_xattn": False}


def of_finalization(schedules: Any, groups: Any, force_all_reduce: bool | None) -> dict[str, Any]:
    """What Megatron's own schedule tells `finalize_model_grads`, of what it has been told."""
    schedule = schedules.forward_backward_pipelining_without_interleaving
    if groups is None:
        return taken(schedule, force_all_reduce=force_all_reduce)
    return taken(schedule, force_all_reduce=force_all_reduce, pg_collection=groups, grad_finalize_pgs=groups)


def reasons_to_leave(schedules: Any, model: Any) -> list[str]:
    """Why the messages of this release's model are not of one tensor and one pipeline; [] if they are."""
    if "model_type" not in parameters(schedules.get_tensor_shapes):
        return []
    reasons = []
    if schedules.get_model_type(model) is schedules.ModelType.encoder_and_decoder:
        reasons.append("an encoder with a decoder: its stages exchange two tensors")
    if isinstance(schedules.parallel_state.get_pipeline_model_parallel_group(), list):
        reasons.append("the encoder has another tensor parallel size: a rank is in several pipelines")
    return reasons


def in_stage(schedules: Any, chunk: int | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; where passes are not told their virtual stage, one that sets Megatron's number of it first."""
    if chunk is None or "vp_stage" in parameters(schedules.forward_step):
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        schedules.parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        return function(*args, **kwargs)

    return called


def communicator(schedules: Any, group: Any, config: Any) -> Any:
    """Megatron's communicator of a pipeline, or its functions under the names of one."""
    if hasattr(schedules, "P2PCommunicator"):
        return schedules.P2PCommunicator(pp_group=group, config=config)
    return FunctionCommunicator(schedules.p2p_communication, group, config)


class FunctionCommunicator:
    """The messages of a release that has functions for them, which read the group themselves."""

    def __init__(self, functions: Any, group: Any, config: Any) -> None:
        self.pp_group = group
        for name in _MESSAGES:
            setattr(self, name, functools.partial(getattr(functions, name), config=config))
