"""Which transformer layers give up an output and compute it again, and when that makes no sense: for both features.

Layers are taken in the order in which their outputs are kept longest: with virtual pipeline stages the first layer of
every chunk, then the second one, so that all chunks give up as much. Layers that `--recompute-granularity full`
computes again as a whole are passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Context, OptionError, Session, Wrap


def is_chosen(config: Any, place: int, chunk: int | None, number: int | None) -> bool:
    """Whether the layer at `place` of this rank's virtual pipeline `chunk` is among the first `number`; None is all."""
    whole = config.recompute_granularity == "full"
    passed_over = config.recompute_num_layers or 0 if whole and config.recompute_method == "block" else 0
    if place < passed_over or (whole and config.recompute_method != "block"):
        return False
    turn = (place - passed_over) * (config.virtual_pipeline_model_parallel_size or 1) + (chunk or 0)
    return number is None or turn < number


def in_chosen_layers(number_of: str, prepare: Callable[[Any, Session], None]) -> Wrap:
    """The patch that calls `prepare(layer, session)` for every chosen layer that is built.

    number_of: where the settings have how many layers of a rank are chosen.
    """

    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        signature = inspect.signature(wrapped)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs).arguments
            # The number within the chunk, before Megatron adds those of earlier stages.
            place = given.get("layer_number", 1) - 1
            if is_chosen(self.config, place, given.get("vp_stage"), session.settings[number_of]):
                prepare(self, session)

        return __init__

    return Wrap("megatron.core.transformer.transformer_layer:TransformerLayer.__init__", around)


def why_not(context: Context, flag: str, number_of: str) -> list[str]:
    """Reasons that hold for both. Raises OptionError for a number of layers that is none."""
    number = context.settings.get(number_of)
    if number is not None and number < 1:
        raise OptionError(f"{flag}-num-layers {number}: want how many layers of a pipeline rank, at least 1")
    reasons = []
    if context.settings.get("mindspeed_lite_auto") and not context.settings.get(flag[2:].replace("-", "_")):
        reasons.append("it trades time for memory: ask for it by name")
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine has its own --recompute-modules")
    if context.arg("recompute_granularity", None) == "full" and context.arg("recompute_method", None) != "block":
        reasons.append("--recompute-granularity full computes every layer again as a whole")
    for name, what in (
        ("fp8", "--fp8-format keeps outputs in another form"),
        ("fp4", "--fp4-format keeps outputs in another form"),
        ("cpu_offloading", "--cpu-offloading moves what is given up here"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading moves what is given up here"),
        ("enable_cuda_graph", "--enable-cuda-graph records a layer once"),
    ):
        if context.arg(name, None):
            reasons.append(what)
    return reasons
