"""Log-probability and entropy per token from hidden states, materialising only chunks of the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_lite.ops import cross_entropy
from mindspeed_lite.ops.cross_entropy import Gather
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.linear_cross_entropy import BATCH_DEPENDENCE, Accumulate, Case, checked, chunks

__all__ = ["OPERATOR", "linear_log_prob"]

# The kernels of cross_entropy, for chunks of the logits.
OPERATOR = Operator(
    "linear_log_prob",
    cross_entropy.reference.statistics,
    cross_entropy.OPERATOR.backends,
    batch_dependence=BATCH_DEPENDENCE,
)


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    entropy: bool = False,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
    accumulate: Accumulate | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the targets and, with `entropy`, the entropy (else None).

    log p(target) and -sum_v p_v log p_v, both [...] in fp32 and differentiable, where p = softmax(x / temperature) and
    x = hidden @ weight^T, with soft_cap x = soft_cap tanh(hidden @ weight^T / soft_cap). Both are 0 with gradient 0
    where target is `ignore_index`. Mask other targets outside the vocabulary. Memory, shapes and the remaining
    arguments are those of `linear_cross_entropy`.
    """
    for name, value in (("temperature", temperature), ("soft_cap", soft_cap)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"linear_log_prob: {name} is {value}, and must be positive and finite")
    shard = checked("linear_log_prob", hidden, weight, target, vocab_start, vocab_size, gather)
    kernels = OPERATOR.module(Case(hidden.device.type, hidden.dtype), hidden)
    head = chunks.Head(temperature, soft_cap, entropy)
    loss, entropies = chunks.loss_and_entropy(kernels, hidden, weight, target, shard, accumulate, head)
    ignored = target == ignore_index
    return torch.where(ignored, 0.0, -loss), None if entropies is None else torch.where(ignored, 0.0, entropies)
