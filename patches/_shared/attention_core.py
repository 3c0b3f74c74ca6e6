"""What a call of Megatron's local core attention asks for: read in one place for all that compute it."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mindspeed_lite.engine import Session
from mindspeed_lite.ops.attention.packed import Packing
from mindspeed_lite.platform.megatron import CONFIG

CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_SOFTMAX = "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax"
_PACK = "megatron.core.packed_seq_params:PackedSeqParams"
_UTILS = "megatron.core.transformer.utils"
READS = (
    "attention_dropout",
    "attn_mask_type",
    "config",
    "hidden_size_per_attention_head",
    "scale_mask_softmax",
    "softmax_scale",
    f"{CONFIG}.sequence_parallel",
    f"{_SOFTMAX}.scale",
    f"{_PACK}.qkv_format",
    *(f"{_PACK}.cu_seqlens_{name}" for name in ("q", "kv", "q_padded", "kv_padded")),
)
# What the operator repeats of Megatron's: which scores are hidden, and the softmax of the others.
SOFTMAX_AND_MASKS = (
    f"{_SOFTMAX}.forward_torch_softmax",
    "megatron.core.fusions.fused_softmax:SoftmaxOne",
    *(f"{_UTILS}:{name}_mask" for name in ("get_default_causal", "get_sliding_window_causal")),
    f"{_UTILS}:attention_mask_func",
)
RELIES_ON = (f"{_SOFTMAX}.forward", *SOFTMAX_AND_MASKS)

# What multi-latent attention tells a core attention's constructor besides.
HEAD_SIZES = ("k_channels", "v_channels")


class CoreCall(NamedTuple):
    """What is asked of one attention besides its tensors, in the words of `ops.attention`; mask: where one is read.

    A mask and a window hide together.
    """

    causal: bool
    window: tuple[int, int] | None
    mask: Any
    scale: float
    dropout_p: float
    sink: Any

    @property
    def options(self) -> dict[str, Any]:
        """As keywords of the operator, the mask left out."""
        return {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            "sink": self.sink,
        }


def read_call(module: Any, query: Any, attention_mask: Any, is_pack: bool) -> CoreCall:
    """Read a call off the module, whose own mask type counts: Megatron's local path ignores the argument."""
    from megatron.core.transformer.enums import AttnMaskType

    # Before 0.15 there are no windows and no sinks.
    softmax, sink = module.scale_mask_softmax, getattr(module, "softmax_offset", None)
    window = getattr(softmax, "window_size", None)
    if is_pack:
        # As Transformer Engine: a pack's masks are its lengths and the module's kind.
        causal = module.attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        mask = None
    else:
        causal = (
            module.attn_mask_type == AttnMaskType.causal
            and attention_mask is None
            and window is None
            and query.size(0) > 1
        )
        mask = attention_mask
        if window is not None and mask is not None:
            reads_mask, reads_window = _read_together(softmax, mask.device)
            mask, window = mask if reads_mask else None, window if reads_window else None
    return CoreCall(
        causal,
        window,
        mask,
        # Layer-wise query-key scaling divides here and multiplies before the softmax.
        module.softmax_scale * (softmax.scale or 1.0),
        module.attention_dropout.p if module.training else 0.0,
        None if sink is None else sink.to(query.device),
    )


# By the softmax of a release, what it reads of a mask and a window that are given together: the mask, the window.
_READ_TOGETHER: weakref.WeakKeyDictionary[Any, tuple[bool, bool]] = weakref.WeakKeyDictionary()


def _read_together(softmax: Any, device: torch.device) -> tuple[bool, bool]:
    """Megatron up to 0.19 drops a mask beside a window; later ones join them. The loaded code is asked."""
    function = type(softmax).forward_torch_softmax
    if function not in _READ_TOGETHER:
        probe = copy.copy(softmax)
        probe.window_size = (1, 0)  # hides [0, 1]
        mask = torch.tensor([[[[False, False], [True, False]]]], device=device)
        found = applied_mask(probe, (1, 1, 2, 2), mask).expand(1, 1, 2, 2)[0, 0].tolist()
        _READ_TOGETHER[function] = found[1][0], found[0][1]
    return _READ_TOGETHER[function]


def applied_mask(softmax: Any, scores: tuple[int, ...], attention_mask: Any) -> Any:
    """The mask by which the loaded Megatron hides scores [b, n, sq, sk] of this shape, or None."""
    given: list[Any] = []

    def record(scores: Any, mask: Any) -> Any:
        given.append(mask)
        return scores

    recorder = copy.copy(softmax)
    recorder.mask_func = record
    recorder.forward_torch_softmax(torch.empty(scores, device="meta"), attention_mask)
    return given[-1] if given else None


def why_not_packed(module: Any, query: Any, params: Any) -> list[str]:
    """What keeps a pack from the operator."""
    from megatron.core.transformer.enums import AttnMaskType

    reasons = []
    if params.qkv_format != "thd" or query.dim() != 3:
        reasons.append(f"a packed sequence in format {params.qkv_format}, {query.dim()} dimensions, is none of thd")
    elif params.cu_seqlens_q is None or params.cu_seqlens_kv is None:
        reasons.append("a packed sequence without cu_seqlens_q and cu_seqlens_kv")
    if module.attn_mask_type == AttnMaskType.arbitrary:
        reasons.append("an arbitrary mask over a packed sequence")
    return reasons


def packing_of(params: Any) -> Packing:
    """Where the sequences of a pack stand."""
    return Packing.of(
        params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
    )


def dropout_generator(module: Any, dropout_p: float) -> contextlib.AbstractContextManager[Any]:
    """The generator that a call draws dropout from; under sequence parallelism Megatron has forked it already."""
    from megatron.core import tensor_parallel

    if dropout_p > 0.0 and not module.config.sequence_parallel:
        tracker: contextlib.AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return tracker
    return contextlib.nullcontext()


def without_head_sizes(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The constructor without the head sizes that multi-latent attention names; the operator reads them off tensors."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        for size in HEAD_SIZES:
            keywords.pop(size, None)
        wrapped(self, *arguments, **keywords)

    return __init__
