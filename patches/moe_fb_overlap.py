"""`--moe-fb-overlap`: overlap one micro-batch's forward with another's backward.

Turns on Megatron's `--overlap-moe-expert-parallel-comm` and `delay_wgrad_compute`. Reaches
`TransformerLayerSchedulePlan.run`, to issue each message as soon as its input exists, and
`ScheduleNode.default_backward_func`, which must skip outputs without a gradient. Leaves micro-batch order and
computations alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Context, Feature, Function, Override, Session, matches
from mindspeed_lite.platform import megatron

from ._shared import moe, pipeline_orders
from ._shared.conditions import turn_on

ARGUMENT = "overlap_moe_expert_parallel_comm"
_PLAN = "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan"
_UNSUPPORTED = {
    "<0.16": "before Megatron 0.16 its combined schedule asks no layer of the local implementation for weight gradients"
}
_STAGES = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def _run(wrapped: Function, session: Session) -> Function:
    """Schedule of two layers: forward (F) and backward (B) of different micro-batches.

    Messages start as soon as their input exists; weight gradients (W) run during the next one. Gradient sums keep
    Megatron's order: bitwise equal.

    Overlap:
        B combine: W of the previous pair, F attention
        F dispatch: B experts
        B dispatch: F experts (W experts in the last layer or without a forward)
        F combine: B attention
    """

    def run(
        f_layer: Any, b_layer: Any, f_input: Any = None, b_grad: Any = None, is_last_layer_in_bwd: bool = False
    ) -> Any:
        wgrads: list[Callable[[], None]] = session.state("delayed wgrads", list)

        def compute_wgrads() -> None:
            while wgrads:
                wgrads.pop(0)()

        if b_layer is not None:
            b_grad = b_layer.mtp_post_process.backward(b_grad)
            b_grad = b_layer.moe_combine.backward(b_grad)
            compute_wgrads()

        if f_layer is not None:
            f_input = _forward(f_layer, _attention(f_layer), f_input)
            f_input = _forward(f_layer, f_layer.moe_dispatch, f_input)

        if b_layer is not None:
            b_grad = b_layer.mlp.backward(b_grad)
            wgrads.append(b_layer.mlp.backward_dw)
            b_grad = b_layer.moe_dispatch.backward(b_grad)
            if f_layer is None or is_last_layer_in_bwd:
                compute_wgrads()
            if b_layer.config.ep_overlap_early_attn_memory_release:
                b_grad = _attention(b_layer).backward(b_grad)

        if f_layer is not None:
            f_input = _forward(f_layer, f_layer.mlp, f_input)
            f_input = _forward(f_layer, f_layer.moe_combine, f_input)

        if b_layer is not None and not b_layer.config.ep_overlap_early_attn_memory_release:
            b_grad = _attention(b_layer).backward(b_grad)

        if f_layer is not None:
            f_input = _forward(f_layer, f_layer.mtp_post_process, f_input)

        # Megatron computes the last layer's attention wgrad during pipeline messages.
        if b_layer is not None and not is_last_layer_in_bwd:
            wgrads.append(_attention(b_layer).backward_dw)

        return f_input, b_grad

    return run


def _attention(layer: Any) -> Any:
    """The part of a layer before its dispatch; renamed in 0.19."""
    return layer.pre_dispatch_computation if hasattr(layer, "pre_dispatch_computation") else layer.attn


def _forward(layer: Any, part: Any, x: Any) -> Any:
    renamed = getattr(layer, "get_low_precision_context", None)
    with layer.get_fp8_context() if renamed is None else renamed():
        return part.forward(x)


def _backward(wrapped: Function, session: Session) -> Function:
    def default_backward_func(self: Any, outputs: Any, output_grad: Any) -> Any:
        pairs = [pair for pair in zip(outputs, output_grad, strict=True) if pair[0].requires_grad]
        if pairs:
            wrapped(self, *zip(*pairs, strict=True))
        return output_grad

    return default_backward_func


def release_reasons(context: Context) -> list[str]:
    """Why the combined schedule does not run on this release; [] if unknown."""
    release = context.versions.get(megatron.HOST)
    return [why for releases, why in _UNSUPPORTED.items() if release and matches(releases, release)]


def layout_reasons(context: Context) -> list[str]:
    """Why the combined schedule does not run with these arguments.

    Megatron only asserts them in `TransformerConfig.__post_init__`.
    """
    arg = context.arg
    found = moe.exchanges(context)
    if not found:
        each = arg("num_experts", 0) // arg("expert_model_parallel_size", 1)
        if each == 1 and matches("<0.17", context.versions.get(megatron.HOST, "1")):
            found.append(
                "one expert a rank, whose input the schedule of Megatron 0.16 frees: add experts, or take 0.17"
            )
    found += moe.dispatchers("alltoall", "flex")(context)
    # DualPipeV brings its virtual stages.
    has_stages = any(arg(name, None) for name in _STAGES) or context.settings.get(pipeline_orders.METHOD)
    if (arg("pipeline_model_parallel_size", 1) or 1) > 1 and not has_stages:
        found.append(
            "--pipeline-model-parallel-size above 1 without virtual stages: no two micro-batches overlap; "
            "add --num-virtual-stages-per-pipeline-rank 2"
        )
    if arg("recompute_granularity", None) == "full":
        found.append("--recompute-granularity full runs whole layers, which the schedule takes apart")
    if "moe" in (arg("recompute_modules", None) or ()):
        found.append("--recompute-modules moe runs the layer of experts whole, which the schedule takes apart")
    if not (arg("bf16", False) or arg("fp16", False)):
        found.append("neither --bf16 nor --fp16 is given, which the schedule needs")
    if arg("moe_shared_expert_overlap", False):
        found.append("--moe-shared-expert-overlap overlaps the same messages with the shared expert: give only one")
    if (arg("mtp_num_layers", 0) or 0) > 1:
        found.append("--mtp-num-layers above 1: the schedule takes one such layer")
    return found


def _why_not(context: Context) -> list[str]:
    # In Python the configuration is checked when the model is built.
    return [] if context.host_args is None else layout_reasons(context)


FEATURE = Feature(
    name="moe_fb_overlap",
    summary="expert all-to-alls overlapped with the computation of another micro-batch",
    numerics="ulp",
    theme="experts",
    unsupported=_UNSUPPORTED,
    condition=_why_not,
    not_auto="two micro-batches are under way at once, which takes memory: enable it explicitly with its flag",
    arguments=turn_on(ARGUMENT),
    patches=(
        Override(f"{_PLAN}.run", _run),
        Override("megatron.core.pipeline_parallel.utils:ScheduleNode.default_backward_func", _backward),
    ),
)
