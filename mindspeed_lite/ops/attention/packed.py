"""attention over sequences of several lengths that stand behind one another, each seeing itself only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.ops.attention import attention as dense
from mindspeed_lite.ops.attention import band
from mindspeed_lite.ops.attention.case import Case, module, prepare
from mindspeed_lite.ops.attention.packing import Packing, Spans

__all__ = ["Packing", "attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """The package's `attention` within each sequence of `packing`.

    q: [t, n, d], k: [u, g, d], v: [u, g, dv]. Returns out [t, n, dv], contiguous, and with `return_lse` also lse
    [n, t]. Rows of no sequence are padding: they return 0 and the lse -inf, and get and give no gradient. The other
    arguments are those of the package's `attention`.

    Sequences of one length run as a batch; others through the device's kernel for packs where it has one, else one
    after the other.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError("packed attention: q, k and v must be [tokens, head, head size]")
    for name, t, spans in (("queries", q, packing.q), ("keys", k, packing.k), ("values", v, packing.k)):
        if spans and spans[-1][1] > t.shape[0]:
            raise ValueError(f"packed attention: a sequence ends at row {spans[-1][1]} of {t.shape[0]} {name}")
    alone = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    case, causal, window, scale = prepare(*alone, causal, None, scale, dropout_p, window, sink)
    packing = packing.of_queries()
    out, lse = _contiguous(
        case,
        _joined(q, packing.q),
        _joined(k, packing.k),
        _joined(v, packing.k),
        [stop - start for start, stop in packing.q],
        [stop - start for start, stop in packing.k],
        dict(causal=causal, scale=scale, dropout_p=dropout_p, window=window, sink=sink, return_lse=return_lse),
    )
    out = _spread(out, packing.q, q.shape[0], 0.0, 0)
    return (out, _spread(lse, packing.q, q.shape[0], float("-inf"), 1)) if return_lse else out


def _contiguous(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: list[int],
    keys: list[int],
    how: dict[str, Any],
) -> tuple[torch.Tensor, Any]:
    """(out, lse or None) of sequences without padding, from their lengths."""
    queries, keys = queries or [0], keys or [0]
    if len(set(queries)) == 1 and len(set(keys)) == 1:
        # [sequences * s, heads, size] -> [s, sequences, heads, size]
        lengths = zip((q, k, v), (queries[0], keys[0], keys[0]), strict=True)
        batched = (t.view(len(queries), s, *t.shape[1:]).transpose(0, 1) for t, s in lengths)
        out, lse = _pair(dense(*batched, **how), how)
        return out.transpose(0, 1).flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1, 2)
    backend = module(q, v, case)
    if not (_leaves_rows_empty(queries, keys, how) or getattr(backend, "why_not_packed", _no_kernel)(case)):
        return _pair(backend.packed(q, k, v, tuple(queries), tuple(keys), **how), how)
    # A split's backward joins the gradients once, where slices would add up tensors of the whole pack.
    sequences = zip(_split(q, queries), _split(k, keys), _split(v, keys), strict=True)
    parts = [_pair(dense(*(t.unsqueeze(1) for t in each), **how), how) for each in sequences]
    out = torch.cat([each for each, _ in parts]).squeeze(1)
    return out, torch.cat([each.squeeze(0) for _, each in parts], -1) if how["return_lse"] else None


def _no_kernel(case: Case) -> list[str]:
    return ["no kernel for packs"]


def _leaves_rows_empty(queries: list[int], keys: list[int], how: dict[str, Any]) -> bool:
    return any(
        k == 0 or band.rows_without_keys(how["causal"], how["window"], q, k) for q, k in zip(queries, keys, strict=True)
    )


def _pair(result: Any, how: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    return result if how["return_lse"] else (result, None)


def _split(t: torch.Tensor, sizes: list[int], dim: int = 0) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(t, sizes, dim)


def _joined(t: torch.Tensor, spans: Spans) -> torch.Tensor:
    """The rows of the sequences, one behind the other."""
    sizes, kept = _pieces(spans, t.shape[0])
    if all(kept):
        return t
    pieces = [piece for piece, keep in zip(_split(t, sizes), kept, strict=True) if keep]
    return torch.cat(pieces) if pieces else t[:0]


def _spread(t: torch.Tensor, spans: Spans, rows: int, value: float, dim: int) -> torch.Tensor:
    """Joined rows at their places among `rows`, and `value` in the others."""
    sizes, kept = _pieces(spans, rows)
    if all(kept):
        return t.contiguous()
    pieces = iter(_split(t, [size for size, keep in zip(sizes, kept, strict=True) if keep] or [0], dim))

    def padding(size: int) -> torch.Tensor:
        shape = list(t.shape)
        shape[dim] = size
        return t.new_full(shape, value)

    whole = [next(pieces) if keep else padding(size) for size, keep in zip(sizes, kept, strict=True)]
    # Whatever is left (of an empty pack, nothing) keeps the result differentiable.
    return torch.cat([*whole, *pieces], dim)


def _pieces(spans: Sequence[tuple[int, int]], rows: int) -> tuple[list[int], list[bool]]:
    """Sizes of sequences and of the paddings between and behind them, in order, and which are sequences."""
    sizes, kept, end = [], [], 0
    for start, stop in spans:
        if start > end:
            sizes.append(start - end)
            kept.append(False)
        sizes.append(stop - start)
        kept.append(True)
        end = stop
    if rows > end:
        sizes.append(rows - end)
        kept.append(False)
    return sizes, kept
