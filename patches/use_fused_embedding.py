"""`--use-fused-embedding`: the vocabulary-parallel embedding without an assignment to masked positions.

Reaches `VocabParallelEmbedding.forward`, the one place where a rank looks up its slice of the vocabulary. Megatron
assigns zeros to the positions of other ranks' tokens, twice, for which a device has to tell the host how many there
are; and lets all of them borrow row 0, whose gradient then is summed from mostly zeros. Under sequence parallelism
the rows are also looked up in the order they are sent in, which saves a copy. Leaves the collectives alone. Steps
aside in deterministic mode, which asks for another gradient kernel, for weights that are distributed further, and for
the inference-optimised collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, Session, Wrap
from mindspeed_lite.ops.vocab_embedding import vocab_embedding


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    from megatron.core.tensor_parallel import mappings

    def forward(self: Any, input_: Any) -> Any:
        if self.tp_group.size() == 1:
            return wrapped(self, input_)
        reasons = _in_the_way(self)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(self, input_)
        if session.verifier is not None:
            session.verifier.leave_out(
                FEATURE.name, "vocab_embedding", "the ranks of a tensor-parallel group compute it"
            )
        ids = input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_  # [b, s] -> [s, b]
        rows: torch.Tensor = vocab_embedding(ids, self.weight, self.vocab_start_index)
        if self.reduce_scatter_embeddings:
            return mappings.reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)

    return forward


def _in_the_way(layer: Any) -> list[str]:
    found = {
        "deterministic mode asks for another gradient kernel": layer.deterministic_mode,
        "the weight is distributed further": getattr(layer, "gtp_remat_size", 1) > 1,
        "inference has collectives of its own": getattr(layer, "use_inference_optimized_reduce_scatter", False)
        and not layer.training,
    }
    return [reason for reason, holds in found.items() if holds]


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("tensor_model_parallel_size", 2) == 1:
        reasons.append("--tensor-model-parallel-size is 1: a rank has the whole vocabulary and masks nothing")
    if context.arg("deterministic_mode", False):
        reasons.append("--deterministic-mode asks for another gradient kernel")
    return reasons


FEATURE = Feature(
    name="use_fused_embedding",
    summary="the vocabulary-parallel embedding without an assignment to masked positions",
    options=(
        Option(
            "--use-fused-embedding",
            help="Look up a tensor-parallel rank's slice of the embedding without assigning to masked positions.",
        ),
    ),
    numerics="bitwise",
    condition=_why_not,
    operators=("vocab_embedding",),
    patches=(Wrap("megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward", _forward),),
)
