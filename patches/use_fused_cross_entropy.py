"""`--use-fused-cross-entropy`: the loss in one pass over the logits, gradient in place.

Reaches `vocab_parallel_cross_entropy` and `fused_vocab_parallel_cross_entropy`, which every model's loss uses. Leaves
Transformer Engine's loss alone. Falls back for label smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Option, Override, Session
from mindspeed_lite.parallel.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel
from mindspeed_lite.verify import Part

UNFUSED = "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy"
# Both apply functions call its methods.
LOSS = "megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy"

# Maximum logits elements for verification in a wider type.
_WIDENED = 1 << 23
_EVERY = slice(None)


def _loss(session: Session, original: Function, logits: Any, target: Any, label_smoothing: float, group: Any) -> Any:
    if label_smoothing > 0.0:
        session.fallback(FEATURE.name, "label smoothing, which the operator does not have")
        return original(logits)
    if session.verifier is not None:
        if group.size() > 1:
            session.verifier.leave_out(FEATURE.name, "cross_entropy", "the ranks of a tensor-parallel group compute it")
        else:
            _verify(session, original, logits, target, group)
    return vocab_parallel(logits, target, group)


def _verify(session: Session, original: Function, logits: Any, target: Any, group: Any) -> None:
    part = slice(0, max(1, _WIDENED // max(1, logits[0].numel())))  # rows are independent

    def ours(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel(logits, target, group)

    session.verifier.check(
        FEATURE.name,
        "cross_entropy",
        FEATURE.numerics,
        ours,
        original,
        {"logits": logits},
        against="Megatron's vocabulary-parallel cross-entropy",
        parts=[Part(lambda logits: original(logits, part), part, [part])],
    )


def _unfused(wrapped: Function, session: Session) -> Function:
    from megatron.core import parallel_state

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> Any:
        def original(logits: Any, rows: slice = _EVERY) -> Any:
            return wrapped(logits, target[rows], label_smoothing, tp_group)

        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        return _loss(session, original, vocab_parallel_logits, target, label_smoothing, group)

    return vocab_parallel_cross_entropy


def _fused(wrapped: Function, session: Session) -> Function:
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Any, target: Any, tp_group: Any) -> Any:
        def original(logits: Any, rows: slice = _EVERY) -> Any:
            return wrapped(logits, target[rows], tp_group)

        return _loss(session, original, vocab_parallel_logits, target, 0.0, tp_group)

    return fused_vocab_parallel_cross_entropy


def _why_not(context: Context) -> Sequence[str]:
    if context.arg("cross_entropy_loss_fusion", False) and context.arg("cross_entropy_fusion_impl", "") == "te":
        return ["--cross-entropy-fusion-impl te uses Transformer Engine's own fused loss"]
    return []


FEATURE = Feature(
    name="use_fused_cross_entropy",
    summary="the loss in one pass over the logits, its gradient in their memory",
    options=(
        Option(
            "--use-fused-cross-entropy",
            help="Compute the loss of the vocabulary-parallel logits in one pass, and its gradient in their memory.",
        ),
    ),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    operators=("cross_entropy",),
    patches=(
        Override(UNFUSED, _unfused, by_name=True, relies_on=(LOSS,)),
        Override(FUSED, _fused, relies_on=(LOSS,)),
    ),
)
