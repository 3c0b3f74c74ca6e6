"""Cross-entropy of logits over a vocabulary, which may be sharded over tensor-parallel ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops import batch_invariant
from mindspeed_lite.ops.batch_invariant import TORCH
from mindspeed_lite.ops.cross_entropy import loss, reference
from mindspeed_lite.ops.cross_entropy.loss import Gather
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "Gather", "cross_entropy"]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype


OPERATOR = Operator("cross_entropy", reference.statistics, batch_dependence={"reference": TORCH, "cpu": "", "cuda": ""})


def cross_entropy(
    logits: Tensor, target: Tensor, vocab_start: int = 0, vocab_size: int | None = None, gather: Gather | None = None
) -> Tensor:
    """loss = log(sum_v exp x_v) - x_target over the whole vocabulary, for every row x of the logits.

    logits: [..., V]; target: [...] of integers; loss: [...] in fp32 (float64 for float64). A target outside the
    vocabulary marks a row to mask, with loss log(sum_v exp(x_v - max x)).

    For the shard [vocab_start, vocab_start + V) of `vocab_size`, `gather` maps local statistics [3, T] (maximum,
    relative sum of exponentials, target's logit) to all shards', [shards, 3, T].

    Saves logits, target and two fp32 values per row. The gradient overwrites logits that only the graph references; a
    second backward pass then raises. Deterministic.
    """
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(f"cross_entropy: want logits [..., V] and target [...], not {_shapes(logits, target)}")
    shard = loss.shard("cross_entropy", target, vocab_start, logits.shape[-1], vocab_size, gather)
    kernels = OPERATOR.module(Case(logits.device.type, logits.dtype), logits)
    with batch_invariant.scope():
        found: Tensor = loss.CrossEntropy.apply(logits, target, kernels, shard)  # type: ignore[no-untyped-call]
    return found


def _shapes(logits: Tensor, target: Tensor) -> str:
    return f"{tuple(logits.shape)} and {tuple(target.shape)}"
