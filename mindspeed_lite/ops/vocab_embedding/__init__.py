"""The rows of an embedding of which this rank holds a shard, for the embedding layer under tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.vocab_embedding import reference

__all__ = ["OPERATOR", "Case", "vocab_embedding"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype


# On a device with a queue, one gather and one pass over the result is what PyTorch has for it.
OPERATOR = Operator("vocab_embedding", reference.vocab_embedding)


def vocab_embedding(
    ids: torch.Tensor, weight: torch.Tensor, vocab_start: int = 0, *, sparse: bool = False
) -> torch.Tensor:
    """y = weight[id - vocab_start] where weight has that row, and zeros elsewhere.

    ids: [...] of integers, any strides; weight: [V, H], the slice [vocab_start, vocab_start + V) of a vocabulary;
    y: [..., H], contiguous. On a device with a queue nothing waits for it: no index is assigned to and no number of
    hits is asked for; for the backward pass the row numbers and one bit per id are kept. An id of another slice borrows
    a row there, another one for each id, and adds zeros to its gradient: one row for all would be added to one at a
    time.

    sparse: the weight's gradient is a sparse COO tensor [V, H] with a row for each id, not coalesced, as
    `torch.nn.functional.embedding` gives it; to be added to something wider, which rounds each row once.
    """
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"vocab_embedding: want weight [V, H] with V at least 1, not {tuple(weight.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"vocab_embedding: ids are {ids.dtype}, and they count tokens")
    return OPERATOR.choose(Case(weight.device.type, weight.dtype))(ids, weight, vocab_start, sparse)
