"""Fused output layer and cross-entropy that materialises only chunks of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops import cross_entropy
from mindspeed_lite.ops.batch_invariant import TORCH
from mindspeed_lite.ops.cross_entropy import Gather, loss
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.linear_cross_entropy import chunks
from mindspeed_lite.ops.linear_cross_entropy.chunks import Accumulate

__all__ = ["OPERATOR", "Accumulate", "Case", "linear_cross_entropy"]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype


BATCH_DEPENDENCE = {
    "reference": TORCH,
    "cpu": "",
    "cuda": "cuBLAS chooses its kernels by the number of rows",
}

# The kernels of cross_entropy, for chunks of the logits.
OPERATOR = Operator(
    "linear_cross_entropy",
    cross_entropy.reference.statistics,
    cross_entropy.OPERATOR.backends,
    batch_dependence=BATCH_DEPENDENCE,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
    accumulate: Accumulate | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight^T, target), a chunk of the vocabulary at a time.

    hidden: [..., H]; weight: [V, H] in the same dtype; target: [...] of integers; loss: [...] in fp32 (float64 for
    float64). `vocab_start`, `vocab_size` and `gather` as in `cross_entropy`; hidden's gradient is then this shard's
    contribution.

    Saves hidden, weight, target, two fp32 values per row and up to 256 MiB of logits, which their gradient overwrites;
    of more than four times as many none. Others are recomputed (one extra matmul). Gradients are summed in fp32 and
    rounded once.

    accumulate: receives weight's gradient instead of autograd.
    """
    shard = checked("linear_cross_entropy", hidden, weight, target, vocab_start, vocab_size, gather)
    kernels = OPERATOR.module(Case(hidden.device.type, hidden.dtype), hidden)
    return chunks.loss_and_entropy(kernels, hidden, weight, target, shard, accumulate, chunks.Head())[0]


def checked(
    operator: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int | None,
    gather: Gather | None,
) -> loss.Shard:
    fits = hidden.dim() > 0 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != target.shape or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{operator}: want hidden [..., H], weight [V, H] in one dtype and target [...], not "
            f"{tuple(hidden.shape)} in {hidden.dtype}, {tuple(weight.shape)} in {weight.dtype} and "
            f"{tuple(target.shape)}"
        )
    return loss.shard(operator, target, vocab_start, weight.shape[0], vocab_size, gather)
