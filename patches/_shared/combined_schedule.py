"""When Megatron's combined schedule (`--overlap-moe-expert-parallel-comm`) can run, in the words of its flags.

Megatron's own checks of the same are assertions, in `TransformerConfig.__post_init__` of 0.16 to 0.19.
"""

from __future__ import annotations

from mindspeed_lite.engine import Context, matches
from mindspeed_lite.platform import megatron

from . import moe, pipeline_orders

ARGUMENT = "overlap_moe_expert_parallel_comm"
UNSUPPORTED = {
    "<0.16": "before Megatron 0.16 its combined schedule asks no layer of the local implementation for weight gradients"
}
_STAGES = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def lacking(context: Context) -> list[str]:
    """What the release lacks for it; [] if nothing is, or the release is not known."""
    release = context.versions.get(megatron.HOST)
    return [why for releases, why in UNSUPPORTED.items() if release and matches(releases, release)]


def why_not(context: Context) -> list[str]:
    """Why the schedule would not run with these arguments; [] if it would."""
    arg = context.arg
    found = moe.why_not_sent(context)
    if not found:
        each = arg("num_experts", 0) // arg("expert_model_parallel_size", 1)
        if each == 1 and matches("<0.17", context.versions.get(megatron.HOST, "1")):
            found.append(
                "one expert a rank, whose input the schedule of Megatron 0.16 frees: add experts, or take 0.17"
            )
    found += moe.why_not_dispatched(context, "alltoall", "flex")
    # DualPipeV brings its virtual stages.
    has_stages = any(arg(name, None) for name in _STAGES) or context.settings.get(pipeline_orders.METHOD)
    if (arg("pipeline_model_parallel_size", 1) or 1) > 1 and not has_stages:
        found.append(
            "--pipeline-model-parallel-size above 1 without virtual stages: no two micro-batches stand side by side; "
            "add --num-virtual-stages-per-pipeline-rank 2"
        )
    if arg("recompute_granularity", None) == "full":
        found.append("--recompute-granularity full runs whole layers, which the schedule takes apart")
    if "moe" in (arg("recompute_modules", None) or ()):
        found.append("--recompute-modules moe runs the layer of experts whole, which the schedule takes apart")
    if not (arg("bf16", False) or arg("fp16", False)):
        found.append("neither --bf16 nor --fp16 is given, and the schedule takes no other numbers")
    if arg("moe_shared_expert_overlap", False):
        found.append("--moe-shared-expert-overlap hides the same messages behind the shared expert: say only one")
    if (arg("mtp_num_layers", 0) or 0) > 1:
        found.append("--mtp-num-layers above 1: the schedule takes one such layer")
    return found
