"""`--use-fused-embedding`: embedding without masked assignment, row-sparse gradient.

Reaches `VocabParallelEmbedding.forward`. Megatron assigns zeros to other ranks' tokens, which syncs the device, and
makes a dense [V, h] gradient per micro-batch. Leaves collectives and gradient hooks alone. Auto leaves it off on CUDA,
where sums of rows vary from run to run. Falls back in deterministic mode, for sharded weights and inference
collectives; the gradient stays dense without a main gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Context, Feature, Function, Override, Session
from mindspeed_lite.engine.feature import conflict_reasons
from mindspeed_lite.ops.vocab_embedding import vocab_embedding

from ._shared.conditions import every, fsdp_args, holding
from ._shared.wrappers import leave_out

# Devices whose PyTorch adds a sparse tensor to a dense one.
_ADDS_SPARSE = ("cpu", "cuda")


def _forward(wrapped: Function, session: Session) -> Function:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    def forward(self: Any, input_: Any) -> Any:
        reasons = _call_reasons(self)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(self, input_)
        # 0.12 has one global group.
        group = getattr(self, "tp_group", None)
        among = {} if group is None else {"group": group}
        ranks = parallel_state.get_tensor_model_parallel_group() if group is None else group
        alone = ranks.size() == 1
        dense = _dense_because(self.weight)
        if dense and self.weight.device.type in _ADDS_SPARSE and torch.is_grad_enabled() and self.weight.requires_grad:
            session.fallback(FEATURE.name, f"the weight's gradient is of the vocabulary's size: {dense}")
        if alone and dense:
            return wrapped(self, input_)
        why = "its gradient is in rows, and Megatron's is not" if alone else "the ranks of a group compute it"
        leave_out(session, FEATURE, "vocab_embedding", why)
        ids = input_.transpose(0, 1) if self.reduce_scatter_embeddings else input_  # [b, s] -> [s, b]
        if alone:
            # As in Megatron, an unknown id raises.
            return torch.nn.functional.embedding(ids, self.weight, sparse=True)
        rows: Tensor = vocab_embedding(ids, self.weight, self.vocab_start_index, sparse=not dense)
        if self.reduce_scatter_embeddings:
            return mappings.reduce_scatter_to_sequence_parallel_region(rows, **among)
        return mappings.reduce_from_tensor_model_parallel_region(rows, **among)

    return forward


def _call_reasons(layer: Any) -> list[str]:
    found = {
        "deterministic mode asks for another gradient kernel": layer.deterministic_mode,
        "the weight is distributed further": getattr(layer, "gtp_remat_size", 1) > 1,
        "inference has collectives of its own": getattr(layer, "use_inference_optimized_reduce_scatter", False)
        and not layer.training,
    }
    return holding(found)


def _dense_because(weight: Tensor) -> str:
    """Why the gradient is dense; rows need Megatron's hook to add them to the main gradient at once."""
    if weight.device.type not in _ADDS_SPARSE:
        return f"{weight.device.type} adds no rows"
    if getattr(weight, "__fsdp_param__", False) or not isinstance(getattr(weight, "main_grad", None), Tensor):
        return "there is no main gradient to add rows to"
    if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being recorded"
    return ""


def _why_not(context: Context) -> list[str]:
    if context.arg("tensor_model_parallel_size", 2) != 1:
        return []
    reasons = conflict_reasons(fsdp_args("has no main gradient for a gradient in rows"), context.arg)
    if context.device not in _ADDS_SPARSE:
        reasons.append(f"{context.device} has no gradient in rows")
    one = "--tensor-model-parallel-size is 1: a rank has the whole vocabulary and masks nothing"
    return [f"{one}, and {reason}" for reason in reasons]


def _auto_leaves_off(context: Context) -> list[str]:
    """Reasons why auto leaves the feature off: nondeterministic sums, or more tokens than rows."""
    if context.settings.get("use_fused_embedding", False):
        return []
    if context.device == "cuda":
        return ["CUDA adds its rows in no fixed order, so that runs differ in the last bits: enable it with its flag"]
    tokens = (context.arg("micro_batch_size", None) or 1) * (context.arg("seq_length", None) or 0)
    words = context.arg("padded_vocab_size", None) or context.arg("vocab_size", None) or 0
    if context.arg("tensor_model_parallel_size", 2) == 1 and 0 < words <= tokens:
        return [f"a micro-batch of {tokens:,} tokens has no fewer rows than the vocabulary of {words:,}"]
    return []


FEATURE = Feature(
    name="use_fused_embedding",
    summary="the embedding without an assignment to masked positions, its gradient in the rows looked up",
    numerics="ulp",
    theme="operators",
    memory="not predicted: saves one 16-bit gradient of the vocabulary in each micro-batch",
    condition=every(_why_not, _auto_leaves_off),
    conflicting_args={"deterministic_mode": "--deterministic-mode asks for another gradient kernel"},
    operators=("vocab_embedding",),
    patches=(Override("megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward", _forward),),
)
