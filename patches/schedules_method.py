"""`--schedules-method`: DualPipeV, a pipeline in a V with both ends on rank 0.

Rank r of P holds stages r and 2P-1-r; activation memory is 1F1B's (2P+1 chunks). Reaches
`get_transformer_layer_offset`, `is_vp_last_stage`, `is_pp_last_stage`, `is_pipeline_last_stage`, which place layers,
and `mtp_on_this_rank`, so that rank 0 gets tokens and labels. Layer numbers, so checkpoints, are unchanged.
`pipeline_schedule` executes the order; `--moe-fb-overlap` overlaps the two passes of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Context, Feature, Function, Option, OptionError, Override, Relation, Session

from ._shared import pipeline_orders
from ._shared.conditions import several_stages

NAME = pipeline_orders.METHOD
_UTILS = "megatron.core.pipeline_parallel.utils"
_CONFLICTING_ARGS = {
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout places the stages itself",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers: all stages have as many layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers: all stages have as many layers",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers: all stages have as many layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers: all stages have as many layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split counts one stage at each end",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split counts one stage at each end",
    "mtp_num_layers": "--mtp-num-layers: the embedding it shares is in another chunk of the same rank",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step follows Megatron's stages",
}


def _is_up(vp_stage: int | None) -> bool:
    return vp_stage == 1


def _rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def _offset(wrapped: Function, session: Session) -> Function:
    session.state(pipeline_orders.PLACED, object)

    def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
        if not _is_up(vp_stage):
            return wrapped(config, vp_stage, pp_rank)
        rank = _rank() if pp_rank is None else pp_rank
        return wrapped(config, vp_stage, config.pipeline_model_parallel_size - 1 - rank)

    return get_transformer_layer_offset


def _vp_last(wrapped: Function, session: Session) -> Function:
    def is_vp_last_stage(vp_stage: int, vp_size: int | None) -> Any:
        return wrapped(vp_stage, vp_size) and _rank() == 0

    return is_vp_last_stage


def _pp_last(wrapped: Function, session: Session) -> Function:
    def is_pp_last_stage(pp_group: Any) -> Any:
        # The rank of the last stage; Megatron reads the losses there.
        return wrapped(pp_group) or pp_group.rank() == 0

    return is_pp_last_stage


def _last(wrapped: Function, session: Session) -> Function:
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> Any:
        if ignore_virtual:
            return wrapped(ignore_virtual, vp_stage)
        return _is_up(vp_stage) and _rank() == 0

    return is_pipeline_last_stage


def _needs_all(wrapped: Function, session: Session) -> Function:
    def mtp_on_this_rank(*args: Any, **kwargs: Any) -> Any:
        # Such a rank gets tokens and labels; without these layers nothing else asks.
        return wrapped(*args, **kwargs) or _rank() == 0

    return mtp_on_this_rank


def _why_not(context: Context) -> list[str]:
    arg = context.arg
    if context.settings[pipeline_orders.SCHEDULE]:
        raise OptionError(f"{NAME}: --schedules-method and --pipeline-schedule both name an order: leave one out.")
    if context.host_args is None:
        return []
    size, layers = arg("pipeline_model_parallel_size", 1) or 1, arg("num_layers", 0)
    reasons = several_stages("one rank has nothing to schedule")(context)
    chunks = pipeline_orders.chunks_of(context)
    if chunks is not None and chunks > 2:
        reasons.append(f"a rank has 2 model chunks, not {chunks}: leave out --num-virtual-stages-per-pipeline-rank")
    if layers and layers % (2 * size):
        reasons.append(f"--num-layers {layers} must be a multiple of {2 * size}, the number of stages")
    if not arg("untie_embeddings_and_output_weights", True):
        reasons.append("the embedding and the output layer share a weight: add --untie-embeddings-and-output-weights")
    return reasons


def _arguments(context: Context) -> Mapping[str, Any]:
    if context.host_args is None or context.arg("num_layers_per_virtual_pipeline_stage", None):
        return {}
    return {"num_virtual_stages_per_pipeline_rank": 2}


FEATURE = Feature(
    name=NAME,
    summary="DualPipeV: two model chunks a rank in a V, embedding and loss on the first rank",
    options=(
        Option(
            "--schedules-method",
            help="dualpipev: a pipeline that goes down the ranks and up again.",
            default=None,
            choices=("dualpipev",),
            on="dualpipev",
        ),
        Option("--dualpipev-dw-detach", help="DualPipeV: compute weight gradients apart at the end of the step."),
    ),
    numerics="ulp",
    theme="communication",
    unsupported={"<0.16": "before Megatron 0.16 stages have no function that says whether they hold further tokens"},
    condition=_why_not,
    conflicting_args=_CONFLICTING_ARGS,
    requires=(Relation(pipeline_orders.SCHEDULE, "it executes the order"),),
    not_auto="it places layers in another way: enable it explicitly with its flag",
    arguments=_arguments,
    patches=(
        Override("megatron.core.transformer.transformer_layer:get_transformer_layer_offset", _offset),
        Override(f"{_UTILS}:is_vp_last_stage", _vp_last),
        Override(f"{_UTILS}:is_pp_last_stage", _pp_last),
        Override("megatron.core.parallel_state:is_pipeline_last_stage", _last),
        Override("megatron.core.transformer.multi_token_prediction:mtp_on_this_rank", _needs_all),
    ),
)
