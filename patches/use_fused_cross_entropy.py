"""`--use-fused-cross-entropy`: the loss in one pass over the logits, gradient in place.

Reaches `vocab_parallel_cross_entropy` and `fused_vocab_parallel_cross_entropy`, which every model's loss uses. Leaves
Transformer Engine's loss alone. Falls back for label smoothing.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Override, Session
from mindspeed_lite.parallel.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel

from ._shared.wrappers import leave_out, verify

UNFUSED = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
# Both apply functions call its methods.
LOSS = "megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy"

# Maximum logits elements for verification in a wider type.
_WIDENED = 1 << 23
_EVERY = slice(None)


def _loss(wrapped: Function, session: Session) -> Function:
    from megatron.core import parallel_state

    def loss(vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None) -> Any:
        def original(logits: Any, rows: slice = _EVERY) -> Any:
            return wrapped(logits, target[rows], label_smoothing, tp_group)

        if label_smoothing > 0.0:
            session.fallback(FEATURE.name, "label smoothing, which the operator does not have")
            return original(vocab_parallel_logits)
        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        if group.size() > 1:
            leave_out(session, FEATURE, "cross_entropy", "the ranks of a tensor-parallel group compute it")
        else:
            _verify(session, original, vocab_parallel_logits, target, group)
        return vocab_parallel(vocab_parallel_logits, target, group)

    return loss


def _verify(session: Session, original: Function, logits: Any, target: Any, group: Any) -> None:
    rows = slice(0, max(1, _WIDENED // max(1, logits[0].numel())))  # rows are independent
    against = "Megatron's vocabulary-parallel cross-entropy"

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel(logits, target[rows], group)

    def theirs(logits: torch.Tensor) -> Any:
        return original(logits, rows)

    verify(session, FEATURE, "cross_entropy", ours, theirs, {"logits": logits[rows]}, against)


def not_transformer_engines(context: Context) -> list[str]:
    if context.arg("cross_entropy_loss_fusion", False) and context.arg("cross_entropy_fusion_impl", "") == "te":
        return ["--cross-entropy-fusion-impl te uses Transformer Engine's own fused loss"]
    return []


FEATURE = Feature(
    name="use_fused_cross_entropy",
    summary="the loss in one pass over the logits, its gradient in their memory",
    numerics="ulp",
    theme="operators",
    condition=not_transformer_engines,
    operators=("cross_entropy",),
    patches=(*(Override(target, _loss, by_name=True, relies_on=(LOSS,)) for target in (UNFUSED, FUSED)),),
)
