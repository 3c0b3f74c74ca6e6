"""Liger-Kernel's functions, timed next to ours where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Contender, Function, OwnLayout, Peer


def contenders(operator: str, shape: Any) -> list[Contender]:
    """Liger-Kernel's function for a shape of an operator, if it has one."""
    peer = PEERS.get(operator)
    if peer is None or not peer.takes(shape):
        return []
    return [Contender("liger", lambda: peer.make(shape))]


def _peer(
    module: str, name: str, call: Callable[[Any, Any], Function], takes: Callable[[Any], bool] = lambda shape: True
) -> Peer:
    """call: autograd function and shape -> function of the inputs."""

    def make(shape: Any) -> Function:
        return call(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name), shape)

    return Peer(make, takes)


def _rms_norm(function: Any, shape: Any) -> Function:
    """With Gemma's fp32 rounding, not overwriting dy."""
    return lambda x, weight: function.apply(x, weight, 1e-5, float(shape.zero_centered), "gemma", False)


def _cross_entropy(function: Any, shape: Any) -> Function:
    return OwnLayout(
        lambda logits, labels: (logits.clone(), labels),
        lambda logits, labels: function.apply(logits, labels, None, -100, 0.0, 0.0, "none")[0].float(),
        "its own copy of the logits, which the forward pass overwrites with their gradient",
    )


def _linear_cross_entropy(function: Any, shape: Any) -> Function:
    """With a loss per row and fp32 weight gradient sums."""
    options = (None, None, -100, 0.0, 0.0, "none", None, False, torch.float32)
    return lambda x, weight, labels: function.apply(x, weight, labels, *options)[0]


def _geglu(function: Any, shape: Any) -> Function:
    def halves(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(half.clone(memory_format=torch.contiguous_format) for half in x.chunk(2, -1))

    return OwnLayout(halves, function.apply, "the halves are two tensors, overwritten by their gradients")


def _rope(function: Any, shape: Any) -> Function:
    """Rotates queries and keys: half of the heads each."""
    first = shape.n // 2

    def arrange(x: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
        # [b, s, heads, d] in memory, [b, heads, s, d] by shape.
        parts = (x[:, :, :first], x[:, :, first:])
        q, k = (part.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(1, 2) for part in parts)
        angles = angles.detach()[:, 0, 0]
        return q, k, angles.cos(), angles.sin()

    return OwnLayout(
        arrange,
        function.apply,
        "x is two tensors [batch, sequence, heads, size], overwritten by y",
        lambda rotated: torch.cat(rotated, 1).permute(2, 0, 1, 3),
    )


def _vocab_embedding(function: Any, shape: Any) -> Function:
    def run(weight: Tensor, ids: Tensor, dy: Tensor, main_grad: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(function.apply(leaf, ids), leaf, dy)
        return main_grad.add_(gradient)

    return run


def _activation(shape: Any) -> Function:
    module, name, call = _ACTIVATIONS[shape.kind]
    return _peer(module, name, call).make(shape)


_ACTIVATIONS: dict[str, tuple[str, str, Callable[[Any, Any], Function]]] = {
    "swiglu": ("swiglu", "LigerFusedGateUpSiLUMulFunction", lambda function, shape: function.apply),
    "geglu": ("geglu", "LigerGELUMulFunction", _geglu),
    "squared_relu": ("relu_squared", "LigerReLUSquaredFunction", lambda function, shape: function.apply),
}

PEERS: dict[str, Peer] = {
    "activation": Peer(_activation, lambda shape: shape.kind in _ACTIVATIONS and not shape.bias and not shape.weights),
    "cross_entropy": _peer("cross_entropy", "LigerCrossEntropyFunction", _cross_entropy),
    "layer_norm": _peer(
        "layer_norm",
        "LigerLayerNormFunction",
        lambda function, shape: lambda x, weight, bias: function.apply(x, weight, bias, 1e-5),
    ),
    "linear_cross_entropy": _peer(
        "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", _linear_cross_entropy
    ),
    "rms_norm": _peer("rms_norm", "LigerRMSNormFunction", _rms_norm),
    "rope": _peer("rope", "LigerRopeFunction", _rope, lambda shape: shape.pairs == "half" and shape.n > 1),
    "vocab_embedding": _peer(
        "experimental.embedding", "LigerEmbeddingFunction", _vocab_embedding, lambda shape: bool(shape.main)
    ),
}
