"""Where the sequences of a pack begin and end, in the numbers that the host needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

# (start, end) of each sequence's rows.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Packing:
    """Rows of each sequence among the queries and among the keys, in order, without overlap."""

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
        """Without the sequences that have no query; no query sees their keys."""
        pairs = [(q, k) for q, k in zip(self.q, self.k, strict=True) if q[1] > q[0]]
        return self if len(pairs) == len(self.q) else Packing(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))

    @classmethod
    def of(
        cls,
        ends_q: torch.Tensor | Sequence[int],
        ends_k: torch.Tensor | Sequence[int] | None = None,
        starts_q: torch.Tensor | Sequence[int] | None = None,
        starts_k: torch.Tensor | Sequence[int] | None = None,
    ) -> Packing:
        """From cumulative lengths with a leading zero, as flash-attention, Transformer Engine and Megatron have them.

        Args:
            ends_q: cu_seqlens_q; sequence i has ends_q[i + 1] - ends_q[i] queries.
            ends_k: cu_seqlens_kv; those of the queries unless given.
            starts_q: cu_seqlens_q_padded: where sequence i's rows begin, if rows of padding stand between sequences.
            starts_k: cu_seqlens_kv_padded; those of the queries unless given, if the lengths are too.

        Tensors on a device are read once, which waits for it; the same tensors again are not.
        """
        if ends_k is None:
            ends_k, starts_k = ends_q, starts_q if starts_k is None else starts_k
        given = (ends_q, ends_k, starts_q, starts_k)
        on_device = [t for t in given if isinstance(t, torch.Tensor) and t.device.type != "cpu"]
        if not on_device:
            return cls(_spans(ends_q, starts_q), _spans(ends_k, starts_k))
        key = tuple((id(t), t._version if isinstance(t, torch.Tensor) else 0) for t in given)
        known: tuple[object, Packing] | None = _read.get(on_device[0])  # type: ignore[no-untyped-call]
        if known is None or known[0] != key:
            known = (key, cls(_spans(ends_q, starts_q), _spans(ends_k, starts_k)))
            _read[on_device[0]] = known
        return known[1]


# A micro-batch's tensors are the same in every layer.
_read: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _spans(ends: torch.Tensor | Sequence[int], starts: torch.Tensor | Sequence[int] | None) -> Spans:
    ends = ends.tolist() if isinstance(ends, torch.Tensor) else list(ends)
    if starts is None:
        return tuple(itertools.pairwise(ends))
    starts = starts.tolist() if isinstance(starts, torch.Tensor) else list(starts)
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=False))
