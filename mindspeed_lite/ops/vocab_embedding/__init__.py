"""Embedding lookup in a vocabulary shard, for tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.vocab_embedding import reference

__all__ = ["OPERATOR", "Case", "vocab_embedding"]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype


# On accelerators PyTorch's gather plus one masking pass is best.
OPERATOR = Operator("vocab_embedding", reference.vocab_embedding, batch_dependence={"reference": "", "cpu": ""})


def vocab_embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0, *, sparse: bool = False) -> Tensor:
    """y = weight[id - vocab_start] where weight has that row, and zeros elsewhere.

    ids: [...] of integers; weight: [V, H], the vocabulary shard [vocab_start, vocab_start + V); y: [..., H],
    contiguous. Accelerators do not synchronise; they save row numbers and one bit per id. There ids of other shards add
    zeros to the gradient of row id mod V: a single row would serialise.

    sparse: weight's gradient is an uncoalesced COO tensor [V, H]; adding it to a wider dtype rounds each row once.
    """
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"vocab_embedding: want weight [V, H] with V at least 1, not {tuple(weight.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"vocab_embedding: ids are {ids.dtype}, and they count tokens")
    return OPERATOR.choose(Case(weight.device.type, weight.dtype), weight, ids)(ids, weight, vocab_start, sparse)
