"""Implementations that vocab_embedding is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case, movable
from mindspeed_lite.ops.vocab_embedding import vocab_embedding
from mindspeed_lite.ops.vocab_embedding.cases import SLICES


def slice_ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator, on the second slice."""
    rows, tokens = case.shape.rows, _tokens(case.shape.ids, SLICES * case.shape.rows)
    return lambda weight: vocab_embedding(tokens(weight), weight, rows)


def slice_plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron writes."""
    rows, tokens = case.shape.rows, _tokens(case.shape.ids, SLICES * case.shape.rows)

    def run(weight: torch.Tensor) -> torch.Tensor:
        mask = (tokens(weight) < rows) | (tokens(weight) >= 2 * rows)
        local = tokens(weight).clone() - rows
        local[mask] = 0
        out = torch.nn.functional.embedding(local, weight)
        out[mask, :] = 0.0
        return out

    return run


def accumulated_ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator with a sparse gradient, which is added."""
    tokens = _tokens(case.shape.ids, case.shape.rows)

    def run(weight: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(vocab_embedding(tokens(leaf), leaf, sparse=True), dy)
        assert leaf.grad is not None
        return main_grad.add_(leaf.grad)

    return run


def accumulated_plain(case: Case) -> Callable[..., torch.Tensor]:
    """What autograd and a gradient hook do, and what a compiler can be shown of it."""
    rows, tokens = case.shape.rows, _tokens(case.shape.ids, case.shape.rows)

    def run(weight: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ids = tokens(weight)
        out = torch.nn.functional.embedding(ids, weight)
        gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(dy.view_as(out), ids, rows, -1, False)
        return main_grad.add_(gradient)

    return run


def accumulated_liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's embedding, whose dense gradient is added."""
    function: Any = importlib.import_module("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction
    tokens = _tokens(case.shape.ids, case.shape.rows)

    def run(weight: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(function.apply(leaf, tokens(leaf)), leaf, dy)
        return main_grad.add_(gradient)

    return run


def _tokens(count: int, bound: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids below `bound`, always the same."""
    return movable(torch.randint(0, bound, (count,), generator=torch.Generator().manual_seed(2)))
