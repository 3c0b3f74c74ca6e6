"""`--masked-softmax-fusion`: scale, mask and softmax of local attention in one pass.

Reaches `FusedScaleMaskSoftmax.forward`. Megatron's fusion needs CUDA extensions; without them it makes several fp32
passes. Leaves `--no-masked-softmax-fusion` and an installed extension alone. Falls back for sliding windows, softmax
offsets and other masking functions.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Session
from mindspeed_lite.engine.feature import conflict_reasons
from mindspeed_lite.ops.masked_softmax import masked_softmax, why_not

from ._shared.attention_core import SOFTMAX_AND_MASKS
from ._shared.conditions import CUDA_GRAPH_ARGS, every, holding, local, not_disabled, reenable_default
from ._shared.wrappers import after_init, config_field, switch_off, switch_on_again, verify

ARGUMENT = "masked_softmax_fusion"


def _is_there() -> bool:
    return importlib.util.find_spec("scaled_masked_softmax_cuda") is not None


_FIELD = "scaled_masked_softmax_fusion"


def _switch_off(session: Session, softmax: Any) -> bool:
    return switch_off(softmax, _FIELD, session, _is_there)


def _switch_on_again(session: Session, softmax: Any) -> None:
    switch_on_again(softmax, _FIELD, session, _is_there)


def _forward(wrapped: Function, session: Session) -> Function:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    def forward(self: Any, input: Any, mask: Any, softmax_offset: Any = None) -> Any:
        if not self.scaled_masked_softmax_fusion:
            return wrapped(self, input, mask, softmax_offset)
        # As in Megatron without the extension, a given mask replaces the causal one.
        causal = self.attn_mask_type == AttnMaskType.causal and mask is None and input.size(2) > 1
        scale = 1.0 if self.scale is None else float(self.scale)
        reasons = _call_reasons(self, mask, softmax_offset, attention_mask_func)
        reasons = reasons or why_not(input, mask, causal=causal, scale=scale)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            # `wrapped` would choose the absent extension.
            return self.forward_torch_softmax(input, mask, *(() if softmax_offset is None else (softmax_offset,)))

        def ours(scores: Any) -> Any:
            return masked_softmax(scores, mask, causal=causal, scale=scale)

        def theirs(scores: Any) -> Any:
            return self.forward_torch_softmax(scores.clone(), mask)

        against = "Megatron's scaling, mask and softmax"
        verify(session, FEATURE, "masked_softmax", ours, theirs, {"scores": input}, against)
        return ours(input)

    return forward


def _call_reasons(layer: Any, mask: Any, softmax_offset: Any, mask_func: Any) -> list[str]:
    found = {
        "a softmax offset has one number more in its sum": softmax_offset is not None,
        "the window of this layer is a mask of Megatron's making": getattr(layer, "window_size", None) is not None,
        "the masking function is not Megatron's": layer.mask_func is not mask_func,
        "the mask is not one of booleans": mask is not None and mask.dtype != torch.bool,
    }
    return holding(found)


def _why_not(context: Context) -> list[str]:
    reasons = []
    if context.device == "npu":
        reasons += conflict_reasons(CUDA_GRAPH_ARGS, lambda name: context.arg(name, None))
        length = context.arg("seq_length", None)
        if length and (length % 32 or length > 4096):
            reasons.append(f"--seq-length {length} is not a multiple of 32 up to 4096, as the NPU's operator wants it")
    if context.device not in ("cpu", "npu"):
        reasons.append(
            f"there is no kernel for {context.device}; --use-flash-attn, which has one, makes no scores at all"
        )
    return reasons


FEATURE = Feature(
    name="masked_softmax_fusion",
    summary="scale, mask and softmax of Megatron's own attention in one pass",
    # Megatron's flag of the plain name defaults to on, with or without its extension.
    options=(Option("--masked-softmax-fusion", name="use_masked_softmax_fusion"),),
    numerics="ulp",
    theme="operators",
    condition=every(
        local("masks and scales in its own attention, with this flag"),
        not_disabled(ARGUMENT, "--no-masked-softmax-fusion"),
        _why_not,
    ),
    arguments=reenable_default(ARGUMENT),
    operators=("masked_softmax",),
    patches=(
        Override(
            "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward",
            _forward,
            by_name=True,
            reads=("attn_mask_type", "mask_func", "scale", "scaled_masked_softmax_fusion"),
            relies_on=SOFTMAX_AND_MASKS,
        ),
        Around(
            "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.__init__",
            after_init(_switch_off, _switch_on_again),
        ),
        config_field(ARGUMENT, _is_there),
    ),
)
