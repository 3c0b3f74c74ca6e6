"""A call's case with its code, and its inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mindspeed_lite.bench import operators
from mindspeed_lite.bench.operators import BoundCase
from mindspeed_lite.ops.case import OURS
from mindspeed_lite.ops.discovery import cases
from tools.fuzz.call import Call, numbers

# A size that no other is made of, for what `cases.py` has no text for: none at all.
_MARKER = 9973
# Below this a call takes milliseconds.
_MOST_BYTES, _MOST_FLOPS = 1 << 23, 1 << 26


class NoCall(Exception):
    """The text describes no call that is worth a try."""


def bound_case(call: Call) -> BoundCase:
    """The case to run; NoCall if there is none, or a large one."""
    declared, text = cases(call.operator), call.text
    sizes = numbers(text)
    if call.empty >= len(sizes):
        raise NoCall
    if call.empty >= 0:
        place = sizes[call.empty]
        text = f"{text[: place.start()]}{_MARKER}{text[place.end() :]}"
    try:
        if call.variant >= 0:
            found = declared.variants("cpu", call.dtype)[call.variant]
        else:
            found = declared.case(text, "cpu", call.dtype)
    except (ValueError, IndexError):
        raise NoCall from None
    if call.empty >= 0:
        inputs = tuple(dataclasses.replace(each, shape=_emptied(each.shape)) for each in found.inputs)
        if inputs == found.inputs:
            raise NoCall
        found = dataclasses.replace(found, inputs=inputs, shape=_emptied(found.shape))
    elif (
        max(found.forward.bytes, found.both.bytes if found.both else 0) > _MOST_BYTES
        or found.forward.flops > _MOST_FLOPS
    ):
        raise NoCall
    return operators.bind(found).only(OURS)


def inputs_of(call: Call, case: BoundCase) -> list[torch.Tensor]:
    """The case's inputs in the call's layouts and with its values."""
    made = list(case.make())
    for place, tensor in enumerate(made):
        own = tensor.detach().clone()
        if place == 0 and call.values != "normal" and own.is_floating_point() and own.numel():
            _spoil(own, call)
        own = _laid_out(own, call.layouts[place % len(call.layouts)])
        made[place] = own.requires_grad_(tensor.requires_grad)
    return made


def _emptied(shape: Any) -> Any:
    if isinstance(shape, tuple):
        sizes = [_emptied(each) for each in shape]
        return type(shape)(*sizes) if hasattr(shape, "_fields") else tuple(sizes)
    return 0 if shape is not True and shape == _MARKER else shape


def _spoil(tensor: torch.Tensor, call: Call) -> None:
    if call.values in ("large", "zero"):
        tensor.mul_(100.0 if call.values == "large" else 0.0)
    else:
        tensor.view(-1)[call.seed % tensor.numel()] = float(call.values)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another layout; `expanded`, the first of each dimension for all."""
    if not tensor.dim() or layout == "plain":
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = torch.cat([tensor, tensor], -1)
        return wide[..., : tensor.shape[-1]]
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
