"""Chooses transformer layers that release an output and recompute it.

Layers whose outputs live longest come first: the first layer of every virtual stage, then the second ones. Layers under
`--recompute-granularity full` are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Patch, Session
from mindspeed_lite.engine.feature import Numerics
from mindspeed_lite.platform.megatron import CONFIG

from .conditions import config_reasons, cuda_graph_args, every
from .wrappers import filter_kwargs, virtual_stage, with_arguments

NOT_AUTO = "it trades speed for memory: enable it explicitly with its flag"
CONFLICTING_ARGS = {
    "fp8": "--fp8-format keeps outputs in another form",
    "fp4": "--fp4-format keeps outputs in another form",
    "cpu_offloading": "--cpu-offloading moves what is recomputed here",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading moves what is recomputed here",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser runs an MLP as one operation",
    **cuda_graph_args("replays a layer, whose memory is then never released"),
}

_READS = (
    "config",
    f"{CONFIG}.recompute_granularity",
    f"{CONFIG}.recompute_method",
    f"{CONFIG}.recompute_num_layers",
    f"{CONFIG}.virtual_pipeline_model_parallel_size",
)


def feature_of_layers(
    name: str,
    *,
    summary: str,
    numerics: Numerics,
    theme: str,
    prepare: Callable[[Any, Session], None],
    reads: Sequence[str],
    patches: Sequence[Patch],
    condition: Callable[[Context], list[str]] = lambda context: [],
) -> Feature:
    """Feature that prepares layers; its flag with `-num-layers` limits it to the first N of a rank."""
    number, flag = f"{name}_num_layers", f"--{name.replace('_', '-')}"

    def prepare_chosen(layer: Any, session: Session, index: int | None) -> None:
        if is_among(index, session.settings[number]) and can_release(name, layer.config, session):
            prepare(layer, session)

    return Feature(
        name=name,
        summary=summary,
        options=(
            Option(flag),
            Option.count(f"{flag}-num-layers", f"{flag} for the first N layers of each pipeline rank."),
        ),
        enabled=lambda settings: bool(settings.get(name)) or settings.get(number) is not None,
        numerics=numerics,
        theme=theme,
        condition=every(condition, not_full_recompute),
        conflicting_args=CONFLICTING_ARGS,
        not_auto=NOT_AUTO,
        patches=(in_layers(prepare_chosen, reads), *patches),
    )


def not_full_recompute(context: Context) -> list[str]:
    is_full = context.arg("recompute_granularity", None) == "full"
    if is_full and context.arg("recompute_method", None) != "block":
        return ["--recompute-granularity full computes every layer again as a whole"]
    return []


def in_layers(prepare: Callable[[Any, Session, int | None], None], reads: Sequence[str]) -> Around:
    """Patch that calls `prepare(layer, session, recompute_index)` for each layer that is built."""

    def choose(layer: Any, given: Mapping[str, Any]) -> tuple[int | None]:
        # `layer_number` counts within the chunk here.
        return (recompute_index(layer.config, given.get("layer_number", 1) - 1, virtual_stage(given)),)

    def act(session: Session, layer: Any, index: tuple[int | None]) -> None:
        prepare(layer, session, *index)

    return Around(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        with_arguments(choose, act),
        reads=(*_READS, *reads),
    )


def can_release(
    feature: str, config: Any, session: Session, conflicting_args: Mapping[str, str] = CONFLICTING_ARGS
) -> bool:
    reasons = config_reasons(conflicting_args, config)
    if reasons:
        session.fallback(feature, "; ".join(reasons))
    return not reasons


def is_checkpointed(feature: str, session: Session) -> bool:
    """Whether a non-reentrant checkpoint is active, which would never refill released tensors."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return False
    session.fallback(feature, "torch.utils.checkpoint computes the layer again as a whole: nothing is released in it")
    return True


def checkpoint_without_output() -> Any:
    """Megatron's `CheckpointWithoutOutput` without Transformer Engine."""
    from megatron.core import tensor_parallel

    kind = tensor_parallel.CheckpointWithoutOutput
    # Any other value makes Megatron ask Transformer Engine about fp8.
    found = kind(**filter_kwargs(kind, fp8=None))
    found.checkpoint = functools.partial(_checkpoint_if_needed, found, found.checkpoint)
    return found


def _checkpoint_if_needed(checkpoint: Any, own: Function, function: Function, *inputs: Any) -> Any:
    """Checkpoint only if an input needs a gradient; otherwise weights would get none."""
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
        return own(function, *inputs)
    return _run_plainly(checkpoint, function, *inputs)


def _run_plainly(checkpoint: Any, function: Function, *inputs: Any) -> Any:
    checkpoint.discard_output_and_register_recompute = lambda hook_tensor: None
    return function(*inputs)


def _checkpoint_with_fallback(wrapped: Function, session: Session) -> Function:
    def checkpoint(self: Any, run_function: Function, *args: Any) -> Any:
        feature = "recompute_norm" if session.settings.get("recompute_norm") else "adaptive_memory"
        released = not is_checkpointed(feature, session)
        own = functools.partial(wrapped, self)
        return (
            _checkpoint_if_needed(self, own, run_function, *args)
            if released
            else _run_plainly(self, run_function, *args)
        )

    return checkpoint


CHECKPOINT_PATCH = Override(
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint",
    _checkpoint_with_fallback,
    reads=("discard_output_and_register_recompute",),
)


def recompute_index(config: Any, place: int, chunk: int | None) -> int | None:
    """Number of recomputed layers before `place` of `chunk` on this rank; None if skipped."""
    whole = config.recompute_granularity == "full"
    passed_over = config.recompute_num_layers or 0 if whole and config.recompute_method == "block" else 0
    if place < passed_over or (whole and config.recompute_method != "block"):
        return None
    return (place - passed_over) * (config.virtual_pipeline_model_parallel_size or 1) + (chunk or 0)


def is_among(index: int | None, number: int | None) -> bool:
    return index is not None and (number is None or index < number)
