"""Reads calls of Megatron's local core attention and verifies results against it."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Session
from mindspeed_lite.ops.attention import AttentionSpec, cuda_flash, packed, reference
from mindspeed_lite.platform.megatron import CONFIG

from .wrappers import leave_out, verify

CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_SOFTMAX = "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax"
_PACK = "megatron.core.packed_seq_params:PackedSeqParams"
_UTILS = "megatron.core.transformer.utils"
READS = (
    "attn_mask_type",
    "hidden_size_per_attention_head",
    f"{_SOFTMAX}.scale",
    f"{_PACK}.qkv_format",
    *(f"{_PACK}.cu_seqlens_{name}" for name in ("q", "kv", "q_padded", "kv_padded")),
)
SOFTMAX_AND_MASKS = (
    f"{_SOFTMAX}.forward_torch_softmax",
    "megatron.core.fusions.fused_softmax:SoftmaxOne",
    *(f"{_UTILS}:{name}_mask" for name in ("get_default_causal", "get_sliding_window_causal")),
    f"{_UTILS}:attention_mask_func",
)
RELIES_ON = (f"{_SOFTMAX}.forward", *SOFTMAX_AND_MASKS)

HEAD_SIZES = ("k_channels", "v_channels")


class CoreCall(NamedTuple):
    causal: bool
    window: tuple[int, int] | None
    mask: Any
    scale: float
    dropout_p: float
    sink: Any


def choose_flash_kernels(session: Session, name: str, module: Any, query: Tensor) -> None:
    """Activate the device's flash attention for all callers, at the first call of a training on CUDA."""

    def choose() -> bool:
        windowed = getattr(module.config, "window_size", None) is not None
        choice, undo = cuda_flash.activate(dropout=module.attention_dropout.p > 0.0, window=windowed)
        session.on_end(undo)
        session.log_decision(f"{name}: {choice}")
        return True

    if query.device.type == "cuda":  # torch_npu may set `is_cuda` on an NPU tensor
        session.state("flash_kernels", choose)


def read_call(module: Any, query: Any, attention_mask: Any, is_pack: bool) -> CoreCall:
    """Read a call. The module's own mask type counts: Megatron ignores the argument."""
    from megatron.core.transformer.enums import AttnMaskType

    # Before 0.15 there are no windows and no sinks.
    softmax, sink = module.scale_mask_softmax, getattr(module, "softmax_offset", None)
    window = getattr(softmax, "window_size", None)
    if is_pack:
        # As in Transformer Engine, lengths and mask type replace the mask of a pack.
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


# Whether this release's softmax applies the mask together with the window.
_READ_TOGETHER: weakref.WeakKeyDictionary[Any, tuple[bool, bool]] = weakref.WeakKeyDictionary()


def _read_together(softmax: Any, device: torch.device) -> tuple[bool, bool]:
    """Probe the softmax: Megatron up to 0.19 drops a mask given with a window."""
    function = type(softmax).forward_torch_softmax
    if function not in _READ_TOGETHER:
        probe = copy.copy(softmax)
        probe.window_size = (1, 0)
        mask = torch.tensor([[[[False, False], [True, False]]]], device=device)
        found = applied_mask(probe, (1, 1, 2, 2), mask).expand(1, 1, 2, 2)[0, 0].tolist()
        _READ_TOGETHER[function] = found[1][0], found[0][1]
    return _READ_TOGETHER[function]


def applied_mask(softmax: Any, scores: tuple[int, ...], attention_mask: Any) -> Any:
    """Mask that Megatron applies to scores [b, n, sq, sk], or None."""
    given: list[Any] = []

    def record(scores: Any, mask: Any) -> Any:
        given.append(mask)
        return scores

    recorder = copy.copy(softmax)
    recorder.mask_func = record
    recorder.forward_torch_softmax(torch.empty(scores, device="meta"), attention_mask)
    return given[-1] if given else None


def pack_reasons(module: Any, query: Any, params: Any) -> list[str]:
    from megatron.core.transformer.enums import AttnMaskType

    reasons = []
    if params.qkv_format != "thd" or query.dim() != 3:
        reasons.append(f"a packed sequence in format {params.qkv_format}, {query.dim()} dimensions, is none of thd")
    elif params.cu_seqlens_q is None or params.cu_seqlens_kv is None:
        reasons.append("a packed sequence without cu_seqlens_q and cu_seqlens_kv")
    if module.attn_mask_type == AttnMaskType.arbitrary:
        reasons.append("an arbitrary mask over a packed sequence")
    return reasons


def packing_of(params: Any) -> packed.Packing:
    return packed.Packing.of(
        params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
    )


def dropout_generator(module: Any, dropout_p: float) -> contextlib.AbstractContextManager[Any]:
    """Random state for dropout; Megatron has already forked it under sequence parallelism."""
    from megatron.core import tensor_parallel

    if dropout_p > 0.0 and not module.config.sequence_parallel:
        tracker: contextlib.AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return tracker
    return contextlib.nullcontext()


def without_head_sizes(wrapped: Function, session: Session) -> Function:
    """Drop head sizes from constructor arguments; the operator reads them off tensors."""

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        for size in HEAD_SIZES:
            keywords.pop(size, None)
        wrapped(self, *arguments, **keywords)

    return __init__


def without_mask(context: Context) -> dict[str, Any]:
    """Arguments that keep the data loader from making a causal mask."""
    is_needed = context.host_args is None or context.arg("reset_attention_mask", False)
    return {} if is_needed else {"create_attention_mask_in_dataloader": False}


def _without_query_norm(wrapped: Function, session: Session) -> Function:
    """Norm the compressed keys and values alone where queries are not compressed, as before Megatron 0.19.

    Reaches `QKNormConfigResolver.resolve`, which refuses such a local specification (DeepSeek-V2-Lite, PLM). Leaves
    Transformer Engine's, which norms queries inside their projection, alone.
    """

    def resolve(self: Any) -> Any:
        is_fused = self.fused_norm_linear_impl is not None
        if self.has_q_lora or is_fused or not self.config.qk_layernorm:
            return wrapped(self)
        from megatron.core.transformer.identity_op import IdentityOp

        self.has_q_lora = True
        try:
            found = wrapped(self)
        finally:
            self.has_q_lora = False
        return found | {"linear_q_proj": self.submodules.linear_q_proj or self.linear_impl, "q_layernorm": IdentityOp}

    return resolve


WITHOUT_QUERY_NORM = Around(
    "megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver.resolve",
    _without_query_norm,
    versions=">=0.19",
    reads=("config", "fused_norm_linear_impl", "has_q_lora", "linear_impl", "submodules", f"{CONFIG}.qk_layernorm"),
)


# Maximum bytes of scores for verification in a wider type.
_SCORES = 1 << 31


def check(
    session: Session,
    feature: Feature,
    operator: Callable[..., Tensor],
    original: Function,
    module: Any,
    qkv: Sequence[Tensor],
    attention_mask: Any,
    spec: AttentionSpec,
    packing: packed.Packing | None,
) -> None:
    """Compare `operator(q, k, v)` with `original`, Megatron's forward of `module`.

    Megatron computes a pack one sequence at a time. Unsupported calls are compared with the definition. A softmax
    offset counts as a constant.
    """
    if spec.dropout_p > 0.0:
        leave_out(session, feature, "attention", "dropout is on, and each draws in its own way")
        return
    against = "Megatron's DotProductAttention"
    clear = _padding_cleared(module, qkv, attention_mask)
    widened = True

    def theirs(*qkv: Tensor) -> Tensor:
        return clear(_without_buffers(original, *qkv, attention_mask))

    if unsupported := _unsupported(module, qkv, packing):
        against = f"the plain definition, since Megatron's local attention takes no {unsupported}"
        theirs = _definition(spec, packing)
    elif packing is not None:
        against += ", one sequence after the other"
        theirs = _by_sequence(functools.partial(_without_buffers, original), packing)
    else:
        (sq, b, n, _), sk = qkv[0].shape, qkv[1].shape[0]
        widened = b * n * sq * sk * (8 if qkv[0].dtype == torch.float32 else 4) <= _SCORES
    verify(
        session,
        feature,
        "attention",
        lambda *qkv: clear(operator(*qkv).flatten(-2)),
        theirs,
        dict(zip("qkv", qkv, strict=True)),
        against,
        widened=widened,
        variant=_variant(spec, packing),
    )


def _variant(spec: AttentionSpec, packing: packed.Packing | None) -> str:
    words = ["causal"] if spec.causal else []
    if spec.mask is not None:
        words.append("mask")
    if spec.window is not None:
        words.append("window({},{})".format(*spec.window))
    if packing is not None:
        words.append("packed")
    if spec.sink is not None:
        words.append("offset")
    return " ".join(words)


def _unsupported(module: Any, qkv: Sequence[Tensor], packing: packed.Packing | None) -> str:
    if qkv[2].shape[-1] != module.hidden_size_per_attention_head:
        return "values of this size"
    if packing is not None and (packing.q != packing.k or module.attn_mask_type.name not in ("causal", "no_mask")):
        return "packed sequences of this kind"
    return ""


def _definition(spec: AttentionSpec, packing: packed.Packing | None) -> Callable[..., Tensor]:
    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = reference.attention(q, k, v, spec) if packing is None else reference.packed(q, k, v, packing, spec)
        return found.flatten(-2)

    return definition


def _by_sequence(original: Function, packing: packed.Packing) -> Callable[..., Tensor]:
    def of_pack(*qkv: Tensor) -> Tensor:
        out = sum(t.sum() for t in qkv) * qkv[0].new_zeros(qkv[0].shape[0], qkv[0].shape[1] * qkv[2].shape[2])
        for first, last in packing.q:
            if last > first:
                its = original(*(t[first:last].unsqueeze(1) for t in qkv), None)
                out = torch.cat([out[:first], its.squeeze(1), out[last:]])
        return out

    return of_pack


def _padding_cleared(module: Any, qkv: Sequence[Tensor], attention_mask: Any) -> Callable[[Tensor], Tensor]:
    """Clear rows that see no key: zero here, an average in Megatron."""
    if attention_mask is None or qkv[0].dim() != 4:
        return lambda context: context
    (sq, b, n, _), sk = qkv[0].shape, qkv[1].shape[0]

    @functools.cache
    def rows() -> Tensor:
        """[sq, b, n, 1]"""
        mask = applied_mask(module.scale_mask_softmax, (b, n, sq, sk), attention_mask)
        empty: Tensor = mask.all(-1).expand(b, n, sq).permute(2, 0, 1).unsqueeze(-1)
        return empty

    def clear(context: Tensor) -> Tensor:
        by_head = context.reshape(*context.shape[:2], n, -1)
        return by_head.masked_fill(rows(), 0.0).flatten(-2)

    return clear


def _without_buffers(original: Function, *given: Any) -> Any:
    """Run without leaving score buffers in Megatron's global memory buffer."""
    from megatron.core import parallel_state

    buffers = parallel_state.get_global_memory_buffer().buffer
    kept = dict(buffers)
    try:
        return original(*given)
    finally:
        buffers.clear()
        buffers.update(kept)
