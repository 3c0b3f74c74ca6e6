"""Implementations that activation is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_lite.ops.activation import activation
from mindspeed_lite.ops.activation.reference import GATED
from mindspeed_lite.ops.case import Case, OwnLayout

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}
# The file and the class.
_LIGER = {
    "swiglu": ("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    "geglu": ("geglu", "LigerGELUMulFunction"),
    "squared_relu": ("relu_squared", "LigerReLUSquaredFunction"),
}


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    kind = case.shape.kind

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        bias, weights = _given(case, rest)
        return activation(x, kind, bias, weights)

    return run


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us writes."""
    kind = case.shape.kind
    gated, function = kind in GATED, _FUNCTIONS[kind]

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        bias, weights = _given(case, rest)
        if bias is not None:
            x = x + bias
        if gated:
            gate, up = x.chunk(2, -1)
            y = function(gate) * up
        else:
            y = function(x)
        return y if weights is None else y * weights

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's: SwiGLU of both halves in one tensor, as ours takes them; GeGLU of two tensors."""
    kind = case.shape.kind
    module, name = _LIGER[kind]
    function: Any = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    if kind != "geglu":
        run: Callable[..., torch.Tensor] = function.apply
        return run

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Copies: it writes the gradients in their places.
        return tuple(half.clone(memory_format=torch.contiguous_format) for half in x.chunk(2, -1))

    return OwnLayout(halves, function.apply, "the halves are two tensors, whose gradients are written over them")


def _given(case: Case, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rest = list(tensors)
    bias = rest.pop(0) if case.shape.bias else None
    return bias, rest.pop(0) if case.shape.weights else None
