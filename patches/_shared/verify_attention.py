"""`--mindspeed-lite-verify` for attention: our operator and Megatron's formula on one call, and float64 for both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.engine import Feature
from mindspeed_lite.ops.attention import AttentionSpec, packed, reference
from mindspeed_lite.verify import Exact

# Scores (b * n * sq * sk) up to which a verification evaluates all of them in float64 at once, and those of one
# head up to which it does so at all: 1 GiB a matrix.
_SCORES_AT_ONCE = 1 << 26
_SCORES_OF_A_HEAD = 1 << 27


def check(
    verifier: Any,
    feature: Feature,
    operator: Callable[..., torch.Tensor],
    original: Callable[..., Any],
    qkv: Sequence[torch.Tensor],
    spec: AttentionSpec,
    packing: packed.Packing | None,
    *,
    same_size: bool,
) -> None:
    """Hand both ways to compute this call to the verifier.

    `operator` is ours, of q, k and v with `spec` and `packing`; `original` is Megatron's, which takes neither a pack
    nor values of another size than the module's (`same_size` False). Then the definition stands in for it. A softmax
    offset is a constant here.
    """
    if spec.dropout_p > 0.0:
        verifier.leave_out(feature.name, "attention", "dropout is on, and each draws in its own way")
        return
    against = "Megatron's DotProductAttention"
    if packing is not None:
        pack = packing
        against = "the plain definition, since Megatron's local attention takes no packed sequences"

        def ours(*qkv: torch.Tensor) -> torch.Tensor:
            return _flat(operator(*qkv))

        def theirs(*qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv
            return _flat(reference.packed(q, k, v, pack, spec)[0])

        exact = [Exact(theirs)]
    else:
        clear = _padding_cleared(spec.mask, qkv[0].shape[2])

        def ours(*qkv: torch.Tensor) -> torch.Tensor:
            return clear(_flat(operator(*qkv)))

        def theirs(*qkv: torch.Tensor) -> torch.Tensor:
            return clear(_without_buffers(original, *qkv))

        if not same_size:
            against = "the plain definition, since Megatron's local attention takes no values of this size"

            def theirs(*qkv: torch.Tensor) -> torch.Tensor:
                q, k, v = qkv
                return _flat(reference.attention(q, k, v, spec)[0])

        exact = _exact(qkv, spec)
    verifier.check(
        feature.name,
        "attention",
        feature.numerics,
        ours,
        theirs,
        dict(zip("qkv", qkv, strict=True)),
        against=against,
        exact=exact,
        variant=_variant(spec, packing),
    )


def _flat(context: Any) -> torch.Tensor:
    flat: torch.Tensor = context.flatten(-2)
    return flat


def _variant(spec: AttentionSpec, packing: packed.Packing | None) -> str:
    words = ["causal"] if spec.causal else []
    if spec.mask is not None:
        words = ["mask"]
    elif spec.window is not None:
        words = ["window({},{})".format(*spec.window)]
    if packing is not None:
        words.append("packed")
    if spec.sink is not None:
        words.append("offset")
    return " ".join(words)


def _padding_cleared(mask: torch.Tensor | None, heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Zero in rows that see no key: ours are zero, Megatron's an average, and nothing may depend on either."""
    if mask is None:
        return lambda context: context
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)  # [b or 1, n or 1, sq, sk]
    empty = mask.all(-1).permute(2, 0, 1).unsqueeze(-1)  # [sq, b or 1, n or 1, 1]

    def clear(context: torch.Tensor) -> torch.Tensor:
        return _flat(context.reshape(*context.shape[:2], heads, -1).masked_fill(empty, 0.0))

    return clear


def _without_buffers(original: Callable[..., Any], *qkv: torch.Tensor) -> Any:
    """Megatron keeps the memory of its scores for the next call, which there will not be."""
    from megatron.core import parallel_state

    buffers = parallel_state.get_global_memory_buffer().buffer
    kept = dict(buffers)
    try:
        return original(*qkv)
    finally:
        buffers.clear()
        buffers.update(kept)


def _exact(qkv: Sequence[torch.Tensor], spec: AttentionSpec) -> list[Exact]:
    """The definition for float64: in one piece, or where that is too large each sequence's groups of heads."""
    (sq, b, n, _), (sk, _, g, dv) = qkv[0].shape, qkv[2].shape
    if b * n * sq * sk <= _SCORES_AT_ONCE:
        return [Exact(lambda q, k, v: _flat(reference.attention(q, k, v, spec)[0]))]
    if sq * sk > _SCORES_OF_A_HEAD:
        return []
    mask, every, size = spec.mask, slice(None), n // g
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)

    def part(batch: int, group: int) -> Exact:
        one, keys = slice(batch, batch + 1), slice(group, group + 1)
        queries = slice(group * size, (group + 1) * size)
        output = slice(queries.start * dv, queries.stop * dv)
        hidden = mask
        if hidden is not None:
            hidden = hidden[one if hidden.shape[0] > 1 else every, queries if hidden.shape[1] > 1 else every]

        def of_head(head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            its = hidden if hidden is None or hidden.shape[1] == 1 else hidden[:, head : head + 1]
            sink = None if spec.sink is None else spec.sink[queries][head : head + 1]
            return reference.attention(q[:, :, head : head + 1], k, v, spec._replace(mask=its, sink=sink))[0]

        def of_group(*qkv: torch.Tensor) -> torch.Tensor:
            # Recomputed in the backward pass, so that the scores of one head exist at a time.
            recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            return torch.cat([recomputed(of_head, head, *qkv) for head in range(size)], 2).flatten(-2)

        return Exact(of_group, (every, one, output), [(every, one, queries), *[(every, one, keys)] * 2])

    return [part(batch, group) for batch in range(b) for group in range(g)]
