"""`--batch-invariant`: a sequence's forward pass has the same bits in every batch.

Reaches `GPTModel.forward`, within which PyTorch's matmuls, sigmoids and sums on CPU run in forms whose rows are
independent (`ops/batch_invariant.py`), and Megatron's recomputation, which repeats parts of it. Operators of other
features use only backends that declare independent rows. On CUDA matmuls and attention are those of Megatron's own
`--batch-invariant-mode`. Leaves backward passes, loss reductions and other models than GPT alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Function, Relation, Session
from mindspeed_lite.ops import batch_invariant, dispatch

from ._shared.conditions import CUDA_GRAPH_ARGS, every, holding, local
from ._shared.wrappers import within

CHECKPOINTS = "megatron.core.tensor_parallel.random"
LANGUAGE_MODEL = "megatron.core.models.common.language_module.language_module:LanguageModule.__init__"
_PLACE = "draws by a row's place in the batch: set it to 0"
CONFLICTING_ARGS = {
    "hidden_dropout": f"--hidden-dropout {_PLACE}",
    "attention_dropout": f"--attention-dropout {_PLACE}",
    "moe_input_jitter_eps": f"--moe-input-jitter-eps {_PLACE}",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor drops a token if others fill its expert",
    "fp8": "--fp8-format scales a tensor by its largest value",
    "fp4": "--fp4-format scales a tensor by its largest value",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers outside of the model's forward",
    **CUDA_GRAPH_ARGS,
}
_CHUNKS = "it cuts matmuls into chunks of rows whose size it measures"


def _scope(session: Session, _: Any) -> contextlib.AbstractContextManager[None]:
    return batch_invariant.scope()


def _model(wrapped: Function, session: Session) -> Function:
    session.on_end(dispatch.require_batch_invariance())

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with batch_invariant.scope():
            return wrapped(self, *args, **kwargs)

    return forward


def _recomputed(wrapped: Function, session: Session) -> Function:
    def backward(ctx: Any, *args: Any) -> Any:
        # The backward pass of what it recomputes is as without recomputation.
        ctx.run_function = batch_invariant.scoped(ctx.run_function)
        return wrapped(ctx, *args)

    return backward


def _language_model(wrapped: Function, session: Session) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.models.gpt.gpt_model import GPTModel

        wrapped(self, *args, **kwargs)
        if not isinstance(self, GPTModel):
            session.fallback(
                FEATURE.name, f"{type(self).__name__} has parts whose rows are not known to be independent"
            )

    return __init__


def _layout(context: Context) -> list[str]:
    ranks = max(
        int(context.arg(name, 1) or 1) for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size")
    )
    gathered = context.arg("moe_token_dispatcher_type", "") == "allgather"
    experts = int(context.arg("expert_model_parallel_size", 1) or 1)
    return holding(
        {
            "more than 2 tensor-parallel ranks: an all-reduce adds them in an order that depends on the place": ranks
            > 2,
            "--moe-token-dispatcher-type allgather adds the results of all expert-parallel ranks": gathered
            and experts > 1,
            "--context-parallel-size above 1 merges attention over ranks": (
                context.arg("context_parallel_size", 1) or 1
            )
            > 1,
            "--moe-router-load-balancing-type sinkhorn balances over the batch": "sinkhorn"
            in context.arg("moe_router_load_balancing_type", ""),
        }
    )


def _device(context: Context) -> list[str]:
    native = context.arg("batch_invariant_mode", False)
    if context.device == "npu":
        return [f"NPU: {batch_invariant.CANN}"]
    if context.device == "cpu":
        return ["--batch-invariant-mode needs CUDA: remove it"] if native else local("has kernels of its own")(context)
    wanted = "--batch-invariant-mode is not given: on CUDA matmuls and attention are Megatron's own invariant kernels"
    return [] if native else [wanted]


FEATURE = Feature(
    name="batch_invariant",
    summary="a sequence's forward pass has the same bits in every batch, for equal log-probabilities in RL",
    numerics="ulp",
    theme="operators",
    condition=every(_device, _layout),
    conflicting_args=CONFLICTING_ARGS,
    conflicts=(
        Relation("use_ascend_coc", _CHUNKS),
        Relation("use_ascend_mc2", _CHUNKS),
        Relation("moe_fb_overlap", "it runs layers outside of the model's forward"),
    ),
    not_auto="matmuls in tiles of a fixed size are slower",
    memory="not predicted: sigmoids on CPU keep intermediates in fp32",
    patches=(
        Around("megatron.core.models.gpt.gpt_model:GPTModel.forward", _model),
        Around(f"{CHECKPOINTS}:CheckpointFunction.backward", _recomputed),
        Around(f"{CHECKPOINTS}:CheckpointWithoutOutput._recompute", within(_scope)),
        Around(LANGUAGE_MODEL, _language_model),
    ),
)
