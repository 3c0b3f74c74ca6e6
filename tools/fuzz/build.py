"""Builds a call's problem and its inputs."""

from __future__ import annotations

import dataclasses

import torch

from mindspeed_lite.ops.case import DTYPES, OURS, Problem
from mindspeed_lite.ops.discovery import cases
from tools.fuzz.call import Call

# Below this a call takes milliseconds.
_MOST_BYTES, _MOST_FLOPS = 1 << 23, 1 << 26


class NoCall(Exception):
    """The call describes no problem, or a large one."""


def problem(call: Call) -> Problem:
    """The problem to run. Raises NoCall."""
    declared = cases(call.operator)
    try:
        shape = declared.parse(call.text)
        if call.empty >= 0:
            sizes = [name for name, size in vars(shape).items() if type(size) is int and size > 0]
            shape = dataclasses.replace(shape, **{sizes[call.empty]: 0})
        found = declared.of(shape, call.text, "cpu", DTYPES[call.dtype]).only(OURS)
        work = found.both or found.forward
        if work.bytes > _MOST_BYTES or work.flops > _MOST_FLOPS:
            raise NoCall
        found.make()
    except (ValueError, IndexError, RuntimeError, ZeroDivisionError):
        raise NoCall from None
    return found


def inputs_of(call: Call, found: Problem) -> list[torch.Tensor]:
    """The problem's inputs in the call's layouts and with its values."""
    made = list(found.make())
    for place, tensor in enumerate(made):
        own = tensor.detach().clone()
        if place == 0 and call.values != "normal" and own.numel():
            _spoil(own, call)
        own = _laid_out(own, call.layouts[place % len(call.layouts)])
        made[place] = own.requires_grad_(tensor.requires_grad)
    return made


def _spoil(tensor: torch.Tensor, call: Call) -> None:
    if call.values in ("large", "zero"):
        tensor.mul_(100.0 if call.values == "large" else 0.0)
    else:
        tensor.view(-1)[call.seed % tensor.numel()] = float(call.values)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout; `expanded`: the first of each dimension for all."""
    if not tensor.dim() or layout == "plain" or not tensor.is_floating_point():
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = torch.cat([tensor, tensor], -1)
        return wide[..., : tensor.shape[-1]]
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
