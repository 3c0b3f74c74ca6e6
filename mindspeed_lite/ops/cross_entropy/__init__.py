"""Cross-entropy over a vocabulary of which these logits may be one shard, for the loss of a language model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.cross_entropy import reference
from mindspeed_lite.ops.cross_entropy.loss import Gather
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "Gather", "cross_entropy"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype


OPERATOR = Operator("cross_entropy", reference.cross_entropy)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
) -> torch.Tensor:
    """loss = log(sum_v exp x_v) - x_target over the whole vocabulary, for every row x of the logits.

    logits: [..., V]; target: [...] of integers; the loss: [...] in fp32 (float64 for float64 logits).

    A rank with the shard [vocab_start, vocab_start + V) of a vocabulary of `vocab_size` passes `gather`: it takes the
    statistics of this shard, [3, T] (per row: maximum, sum of exponentials relative to it, the target's logit), and
    returns those of all shards, [shards, 3, T]. A target outside the vocabulary marks a row to be masked: its loss is
    log(sum_v exp(x_v - max x)).

    Keeps the logits in their own dtype, the target and two fp32 numbers per row; makes no fp32 copy of the logits. The
    gradient, (softmax - onehot) dloss, overwrites the logits if only the graph refers to their memory. They then count
    as modified in place: a second backward pass raises autograd's error. Deterministic.
    """
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(f"cross_entropy: want logits [..., V] and target [...], not {_shapes(logits, target)}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"cross_entropy: target is {target.dtype}, and it counts tokens")
    width = logits.shape[-1]
    size = vocab_start + width if vocab_size is None else vocab_size
    if width == 0 or vocab_start < 0 or vocab_start + width > size or (gather is None and width != size):
        raise ValueError(
            f"cross_entropy: the slice of {width} from {vocab_start} of a vocabulary of {size} is not one, or it is "
            f"not the whole and nothing gathers the others"
        )
    implementation = OPERATOR.choose(Case(logits.device.type, logits.dtype))
    return implementation(logits, target, vocab_start, size, gather)


def _shapes(logits: torch.Tensor, target: torch.Tensor) -> str:
    return f"{tuple(logits.shape)} and {tuple(target.shape)}"
