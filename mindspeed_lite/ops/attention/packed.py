"""attention over packed sequences of different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_lite.ops.attention import PositionalDropout, band, module
from mindspeed_lite.ops.attention import attend as attend_dense
from mindspeed_lite.ops.attention import backward as backward_dense
from mindspeed_lite.ops.attention import forward as forward_dense
from mindspeed_lite.ops.attention import prepare as prepare_dense
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case
from mindspeed_lite.ops.rows import precision

__all__ = ["Packing", "attend", "attention", "backward", "forward", "prepare"]


# (start, end) of each sequence's rows.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Packing:
    """Rows of each sequence in the pack's queries and keys, ascending, without overlap."""

    q: Spans
    k: Spans

    def __post_init__(self) -> None:
        if len(self.q) != len(self.k):
            raise ValueError(f"packed attention: {len(self.q)} sequences of queries, but {len(self.k)} of keys")
        for name, spans in (("query", self.q), ("key", self.k)):
            end = 0
            for start, stop in spans:
                if start < end or stop < start:
                    raise ValueError(f"packed attention: the {name} rows {start} to {stop} begin before {end}")
                end = stop

    def of_queries(self) -> Packing:
        """Without the sequences that have no query."""
        pairs = [(q, k) for q, k in zip(self.q, self.k, strict=True) if q[1] > q[0]]
        return self if len(pairs) == len(self.q) else Packing(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))

    @classmethod
    def of(
        cls,
        ends_q: Tensor | Sequence[int],
        ends_k: Tensor | Sequence[int] | None = None,
        starts_q: Tensor | Sequence[int] | None = None,
        starts_k: Tensor | Sequence[int] | None = None,
    ) -> Packing:
        """Packing from cumulative lengths with a leading zero, as in Transformer Engine and Megatron.

        Args:
            ends_q: cu_seqlens_q.
            ends_k: cu_seqlens_kv; default: ends_q.
            starts_q: cu_seqlens_q_padded: first row of each sequence, if there is padding between them.
            starts_k: cu_seqlens_kv_padded; default: starts_q, if ends_k is not given either.

        Synchronises once to read tensors on a device; cached per tensor.
        """
        if ends_k is None:
            ends_k, starts_k = ends_q, starts_q if starts_k is None else starts_k
        given = (ends_q, ends_k, starts_q, starts_k)
        on_device = [t for t in given if isinstance(t, Tensor) and t.device.type != "cpu"]
        if not on_device:
            return cls(_spans(ends_q, starts_q), _spans(ends_k, starts_k))
        key = tuple((id(t), t._version if isinstance(t, Tensor) else 0) for t in given)
        known: tuple[object, Packing] | None = _read.get(on_device[0])  # type: ignore[no-untyped-call]
        if known is None or known[0] != key:
            known = (key, cls(_spans(ends_q, starts_q), _spans(ends_k, starts_k)))
            _read[on_device[0]] = known
        return known[1]


# A micro-batch's tensors are the same in every layer.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _spans(ends: Tensor | Sequence[int], starts: Tensor | Sequence[int] | None) -> Spans:
    ends = ends.tolist() if isinstance(ends, Tensor) else list(ends)
    if starts is None:
        return tuple(itertools.pairwise(ends))
    starts = starts.tolist() if isinstance(starts, Tensor) else list(starts)
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=False))


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, **options: Any) -> Tensor:
    """`attention` within each sequence of `packing`.

    q: [t, n, d], k: [u, g, d], v: [u, g, dv]. options: of the dense `prepare`, without a mask. Returns [t, n, dv],
    contiguous. Padding rows return 0 and have no gradient.

    Sequences of one length run as a batch; others in the device's varlen kernel, or one by one.
    """
    return attend(q, k, v, packing, prepare(q, k, v, packing, **options))


def prepare(q: Tensor, k: Tensor, v: Tensor, packing: Packing, **options: Any) -> AttentionSpec:
    """Checks a packed call's arguments.

    Raises:
        ValueError: tensors or packing do not fit, or a value is out of range.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError("packed attention: q, k and v must be [tokens, head, head size]")
    for name, t, spans in (("queries", q, packing.q), ("keys", k, packing.k), ("values", v, packing.k)):
        if spans and spans[-1][1] > t.shape[0]:
            raise ValueError(f"packed attention: a sequence ends at row {spans[-1][1]} of {t.shape[0]} {name}")
    return prepare_dense(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), **options)


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """`attention` for a `prepare`d call."""
    packing = packing.of_queries()
    out = _contiguous(
        _joined(q, packing.q),
        _joined(k, packing.k),
        _joined(v, packing.k),
        [stop - start for start, stop in packing.q],
        [stop - start for start, stop in packing.k],
        spec,
    )
    return _spread(out, packing.q, q.shape[0])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    dropout: PositionalDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` within each sequence: (out [t, n, dv], lse [n, t]); 0 and -inf in other rows."""
    (rows, n, _), dv = q.shape, v.shape[2]
    exact = precision(q.dtype)
    out = q.new_zeros(rows, n, dv, dtype=exact)
    lse = q.new_full((n, rows), float("-inf"), dtype=exact)
    for each in _sequences(packing, dropout):
        its = (each.of_queries(q), each.of_keys(k), each.of_keys(v))
        part, logs = forward_dense(*its, spec.for_lengths(each.sq, each.sk), each.dropout)
        each.of_queries(out).copy_(part)
        each.of_queries(lse.transpose(0, 1)).copy_(logs.permute(2, 0, 1))
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    dropout: PositionalDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` within each sequence; dout, out: [t, n, dv], lse: [n, t]; zeros in other rows."""
    dq, dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v))
    for each in _sequences(packing, dropout):
        inputs = each.of_queries(dout), each.of_queries(q), each.of_keys(k), each.of_keys(v), each.of_queries(out)
        logs = each.of_queries(lse.transpose(0, 1)).permute(1, 2, 0)
        parts = backward_dense(*inputs, logs, spec.for_lengths(each.sq, each.sk), each.dropout)
        each.of_queries(dq).copy_(parts[0])
        each.of_keys(dk).copy_(parts[1])
        each.of_keys(dv).copy_(parts[2])
    return dq, dk, dv


class _Sequences(NamedTuple):
    """One sequence of a pack, or adjacent ones of one length as a batch."""

    first_q: int
    first_k: int
    sq: int
    sk: int
    batches: int
    dropout: PositionalDropout | None

    def of_queries(self, t: Tensor) -> Tensor:
        """View [sq, batches, ...] of [t, ...]."""
        rows = t[self.first_q : self.first_q + self.sq * self.batches]
        return rows.view(self.batches, self.sq, *t.shape[1:]).transpose(0, 1)

    def of_keys(self, t: Tensor) -> Tensor:
        """View [sk, batches, ...] of [u, ...]."""
        rows = t[self.first_k : self.first_k + self.sk * self.batches]
        return rows.view(self.batches, self.sk, *t.shape[1:]).transpose(0, 1)


def _sequences(packing: Packing, dropout: PositionalDropout | None) -> Iterator[_Sequences]:
    """Sequences with queries and keys; adjacent ones of one length are batched.

    Not with dropout, which depends on the position within the pack.
    """
    pairs = [(q, k) for q, k in zip(packing.q, packing.k, strict=True) if q[1] > q[0] and k[1] > k[0]]
    first = 0
    while first < len(pairs):
        (q0, q1), (k0, k1) = pairs[first]
        sq, sk, last = q1 - q0, k1 - k0, first + 1
        while dropout is None and last < len(pairs):
            ahead = last - first
            if pairs[last] != ((q0 + ahead * sq, q1 + ahead * sq), (k0 + ahead * sk, k1 + ahead * sk)):
                break
            last += 1
        part = dropout and dropout.of_rows(slice(q0, q1), slice(k0, k1))
        yield _Sequences(q0, k0, sq, sk, last - first, part)
        first = last


def _contiguous(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], spec: AttentionSpec) -> Tensor:
    """`attention` of sequences without padding, by length."""
    queries, keys = queries or [0], keys or [0]
    if len(set(queries)) == 1 and len(set(keys)) == 1:
        # [sequences * s, heads, size] -> [s, sequences, heads, size]
        lengths = zip((q, k, v), (queries[0], keys[0], keys[0]), strict=True)
        q, k, v = (t.view(len(queries), s, *t.shape[1:]).transpose(0, 1) for t, s in lengths)
        return attend_dense(q, k, v, spec.for_lengths(queries[0], keys[0])).transpose(0, 1).flatten(0, 1)
    backend = module(spec)
    if not (_leaves_rows_empty(queries, keys, spec) or getattr(backend, "why_not_packed", _no_kernel)(spec.case)):
        out: Tensor = backend.packed(q, k, v, tuple(queries), tuple(keys), spec)
        return out
    # The backward of split concatenates once; slices would each add a gradient of the pack's size.
    sequences = zip(_split(q, queries), _split(k, keys), _split(v, keys), strict=True)
    parts = [
        attend_dense(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), spec.for_lengths(len(q), len(k)))
        for q, k, v in sequences
    ]
    return torch.cat(parts).squeeze(1)


def _no_kernel(case: Case) -> list[str]:
    return ["no kernel for packs"]


def _leaves_rows_empty(queries: list[int], keys: list[int], spec: AttentionSpec) -> bool:
    return any(
        k == 0 or band.has_rows_without_keys(spec.causal, spec.window, q, k) for q, k in zip(queries, keys, strict=True)
    )


def _split(t: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return torch.split_with_sizes(t, sizes)


def _joined(t: Tensor, spans: Spans) -> Tensor:
    sizes, kept = _pieces(spans, t.shape[0])
    if all(kept):
        return t
    pieces = [piece for piece, keep in zip(_split(t, sizes), kept, strict=True) if keep]
    return torch.cat(pieces) if pieces else t[:0]


def _spread(t: Tensor, spans: Spans, rows: int) -> Tensor:
    """Scatters concatenated rows to their places among `rows`, with zeros between."""
    sizes, kept = _pieces(spans, rows)
    if all(kept):
        return t.contiguous()
    pieces = iter(_split(t, [size for size, keep in zip(sizes, kept, strict=True) if keep] or [0]))
    whole = [next(pieces) if keep else t.new_zeros(size, *t.shape[1:]) for size, keep in zip(sizes, kept, strict=True)]
    # An empty remainder keeps the result differentiable.
    return torch.cat([*whole, *pieces])


def _pieces(spans: Sequence[tuple[int, int]], rows: int) -> tuple[list[int], list[bool]]:
    """Sizes of sequences and paddings, in order, and which are sequences."""
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
