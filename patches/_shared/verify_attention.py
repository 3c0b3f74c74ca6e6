"""`--mindspeed-lite-verify` for attention: our operator and Megatron's own attention on one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Feature
from mindspeed_lite.ops.attention import AttentionSpec, packed, reference
from mindspeed_lite.verify import Part

from .attention_core import applied_mask

# Bytes of a matrix of scores up to which Megatron computes it in a wider type: of all sequences at once, or of one.
_SCORES = 1 << 31
_EVERY = slice(None)


def check(
    verifier: Any,
    feature: Feature,
    operator: Callable[..., torch.Tensor],
    original: Callable[..., Any],
    module: Any,
    qkv: Sequence[torch.Tensor],
    attention_mask: Any,
    spec: AttentionSpec,
    packing: packed.Packing | None,
) -> None:
    """Hand both ways to compute this call to the verifier.

    `operator` is ours, of q, k and v with `spec` and `packing`; `original` is Megatron's forward of `module`, of these
    and a mask, which computes the sequences of a pack one by one. What it cannot compute is compared with the
    definition. A softmax offset is a constant here.
    """
    if spec.dropout_p > 0.0:
        verifier.leave_out(feature.name, "attention", "dropout is on, and each draws in its own way")
        return
    against = "Megatron's DotProductAttention"
    parts: list[Part] | None = []
    clear = _padding_cleared(module, qkv, attention_mask)

    def megatrons(*given: Any, batch: slice = _EVERY) -> torch.Tensor:
        return clear(_without_buffers(original, *given), batch)

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        return megatrons(*qkv, attention_mask)

    why_not = _why_not(module, qkv, packing)
    if why_not:
        against = f"the plain definition, since Megatron's local attention takes no {why_not}"
        theirs = _definition(spec, packing)
    elif packing is not None:
        against += ", one sequence after the other"
        theirs = _by_sequence(functools.partial(_without_buffers, original), packing)
    else:
        parts = _parts(megatrons, qkv, attention_mask)
    verifier.check(
        feature.name,
        "attention",
        feature.numerics,
        lambda *qkv: clear(operator(*qkv).flatten(-2)),
        theirs,
        dict(zip("qkv", qkv, strict=True)),
        against=against,
        parts=parts or (),
        widened=parts is not None,
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


def _why_not(module: Any, qkv: Sequence[torch.Tensor], packing: packed.Packing | None) -> str:
    """What of a call Megatron's local attention cannot compute."""
    if qkv[2].shape[-1] != module.hidden_size_per_attention_head:
        return "values of this size"
    if packing is not None and (packing.q != packing.k or module.attn_mask_type.name not in ("causal", "no_mask")):
        return "packed sequences of this kind"
    return ""


def _definition(spec: AttentionSpec, packing: packed.Packing | None) -> Callable[..., torch.Tensor]:
    def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = reference.attention(q, k, v, spec) if packing is None else reference.packed(q, k, v, packing, spec)
        flat: torch.Tensor = found[0].flatten(-2)
        return flat

    return definition


def _by_sequence(original: Callable[..., Any], packing: packed.Packing) -> Callable[..., torch.Tensor]:
    def of_pack(*qkv: torch.Tensor) -> torch.Tensor:
        # Rows of no sequence are zero, and a function of all three.
        out = sum(t.sum() for t in qkv) * qkv[0].new_zeros(qkv[0].shape[0], qkv[0].shape[1] * qkv[2].shape[2])
        for first, last in packing.q:
            if last > first:
                its = original(*(t[first:last].unsqueeze(1) for t in qkv), None)
                out = torch.cat([out[:first], its.squeeze(1), out[last:]])
        return out

    return of_pack


def _padding_cleared(module: Any, qkv: Sequence[torch.Tensor], attention_mask: Any) -> Callable[..., torch.Tensor]:
    """Zero in rows that see no key: ours are zero, Megatron's an average, and nothing may depend on either."""
    if attention_mask is None or qkv[0].dim() != 4:
        return lambda context, batch=_EVERY: context
    (sq, b, n, _), sk = qkv[0].shape, qkv[1].shape[0]

    @functools.cache
    def rows() -> torch.Tensor:
        """[sq, b, n, 1]"""
        mask = applied_mask(module.scale_mask_softmax, (b, n, sq, sk), attention_mask)
        empty: torch.Tensor = mask.all(-1).expand(b, n, sq).permute(2, 0, 1).unsqueeze(-1)
        return empty

    def clear(context: torch.Tensor, batch: slice = _EVERY) -> torch.Tensor:
        by_head = context.reshape(*context.shape[:2], n, -1)
        return by_head.masked_fill(rows()[:, batch], 0.0).flatten(-2)

    return clear


def _without_buffers(original: Callable[..., Any], *given: Any) -> Any:
    """Megatron keeps the memory of its scores for the next call, which there will not be."""
    from megatron.core import parallel_state

    buffers = parallel_state.get_global_memory_buffer().buffer
    kept = dict(buffers)
    try:
        return original(*given)
    finally:
        buffers.clear()
        buffers.update(kept)


def _parts(original: Callable[..., Any], qkv: Sequence[torch.Tensor], mask: Any) -> list[Part] | None:
    """What Megatron computes in a wider type: all ([]), one sequence where that is too large, or (None) nothing."""
    (sq, b, n, _), sk = qkv[0].shape, qkv[1].shape[0]
    bytes_of_one = n * sq * sk * (8 if qkv[0].dtype == torch.float32 else 4)
    if b * bytes_of_one <= _SCORES:
        return []
    if bytes_of_one > _SCORES:
        return None

    def part(batch: slice) -> Part:
        its = mask[batch] if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 else mask
        return Part(lambda *qkv: original(*qkv, its, batch=batch), (_EVERY, batch), [(_EVERY, batch)] * 3)

    return [part(slice(each, each + 1)) for each in range(b)]
