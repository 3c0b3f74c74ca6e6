"""Calls of an operator as data: drawn, and built into a problem with its inputs."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from mindspeed_lite.ops.case import DTYPES, OURS, Problem
from mindspeed_lite.ops.discovery import cases

LAYOUTS = ("plain", "transposed", "sliced", "strided", "expanded")
VALUES = ("normal", "nan", "inf", "-inf", "large", "zero")
# Compilations and processes take a while.
MODES = (*["here"] * 20, "forked", "fake", "compiled")
# Powers of two and their neighbours, of vectors and of blocks.
SIZES = (*range(1, 10), *range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 129, 257, 1000)
# Below this a call takes milliseconds.
_MOST_BYTES, _MOST_FLOPS = 1 << 23, 1 << 26


@dataclasses.dataclass(frozen=True)
class Call:
    """One call; operator, text and dtype are those of a case.

    empty: the place of the size that is 0 instead, among the shape's sizes; or -1.
    layouts: of the inputs in order, again from the first when there are more inputs.
    values: what one element of the first input is, or `normal`.
    mode: where and how it is called; a forked process has one thread, as a DataLoader's workers have.
    """

    operator: str
    text: str
    dtype: str
    empty: int = -1
    layouts: tuple[str, ...] = ("plain",)
    values: str = "normal"
    threads: int = 1
    mode: str = "here"
    seed: int = 0

    def json(self) -> str:
        """Without defaults."""
        own = dataclasses.asdict(self)
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in own.items() if value != default[name]})

    @classmethod
    def of(cls, text: str) -> Call:
        """The call that `json` wrote."""
        own = json.loads(text)
        return cls(**{**own, "layouts": tuple(own.get("layouts", ("plain",)))})


class NoCall(Exception):
    """The call describes no problem, or a large one."""


def _sizes(text: str) -> list[re.Match[str]]:
    """The sizes in a case's text; neither shares nor switches."""
    return list(re.finditer(r"(?<![\d.])[1-9]\d*(?![\d.])", text))


def _with_size(text: str, place: re.Match[str], size: int) -> str:
    return f"{text[: place.start()]}{size}{text[place.end() :]}"


def draw(chance: random.Random, threads: int, operators: Sequence[str]) -> Call:
    """A call of one of the operators, by at most `threads` threads."""
    operator = chance.choice(operators)
    text = chance.choice(cases(operator).correctness)
    for place in reversed(_sizes(text)):
        if chance.random() < 0.5:
            text = _with_size(text, place, chance.choice(SIZES))
    mode = chance.choice(MODES)
    return Call(
        operator,
        text,
        chance.choice(("bf16", "fp32", "fp16")),
        max(-1, chance.randint(-12, len(_sizes(text)) - 1)),
        tuple(chance.choices(LAYOUTS, k=chance.randint(1, 3))),
        chance.choice((*["normal"] * 6, *VALUES)),
        1 if mode in ("forked", "fake") else chance.randint(1, threads),
        mode,
        chance.randrange(1000),
    )


def problem(call: Call) -> Problem:
    """The problem to run. Raises NoCall."""
    declared = cases(call.operator)
    try:
        shape = declared.parse(call.text)
        if call.empty >= 0:
            sizes = [name for name, size in vars(shape).items() if type(size) is int and size > 0]
            shape = replace(shape, **{sizes[call.empty]: 0})
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
            if call.values in ("large", "zero"):
                own.mul_(100.0 if call.values == "large" else 0.0)
            else:
                own.view(-1)[call.seed % own.numel()] = float(call.values)
        own = _laid_out(own, call.layouts[place % len(call.layouts)])
        made[place] = own.requires_grad_(tensor.requires_grad)
    return made


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another layout; `expanded`: the first of each dimension for all."""
    if not tensor.dim() or layout == "plain" or not tensor.is_floating_point():
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
