"""What a call of Megatron's local core attention asks for: read in one place for all that compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from mindspeed_lite.engine import Session
from mindspeed_lite.ops.attention.packed import Packing
from mindspeed_lite.platform.megatron import CONFIG

CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_SOFTMAX = "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax"
_PACK = "megatron.core.packed_seq_params:PackedSeqParams"
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

# What multi-latent attention tells a core attention's constructor besides.
HEAD_SIZES = ("k_channels", "v_channels")


class CoreCall(NamedTuple):
    """What is asked of one attention besides its tensors, in the words of `ops.attention`; mask: where one is read."""

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
        mask = attention_mask if window is None else None
        causal = (
            module.attn_mask_type == AttnMaskType.causal
            and attention_mask is None
            and window is None
            and query.size(0) > 1
        )
    return CoreCall(
        causal,
        window,
        mask,
        # Layer-wise query-key scaling divides here and multiplies before the softmax.
        module.softmax_scale * (softmax.scale or 1.0),
        module.attention_dropout.p if module.training else 0.0,
        None if sink is None else sink.to(query.device),
    )


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
