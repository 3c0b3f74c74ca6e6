"""Rows of each context-parallel rank, and attention blocks left by a positional mask.

The stream is the sequence, or the sequences of a pack. Megatron's zigzag gives rank r the chunks r and 2P - 1 - r of
2P, which balances a causal mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# (first, end) of row runs.
Spans = tuple[tuple[int, int], ...]
# (left, right) as in `ops.attention.band`: keys visible before and after a query; -1 is no limit.
Band = tuple[int, int]
CAUSAL: Band = (-1, 0)
FREE: Band = (-1, -1)


class RowRun(NamedTuple):
    """Rows `row` to `row + length` of a rank, `start` to `start + length` of the stream."""

    row: int
    start: int
    length: int


Share = tuple[RowRun, ...]


@dataclass(frozen=True)
class Layout:
    """Rows of every rank.

    shares: runs of each rank, ascending. documents: stream spans that attend only to themselves; other rows are
        padding.
    """

    shares: tuple[Share, ...]
    documents: Spans

    @property
    def ranks(self) -> int:
        return len(self.shares)

    def rows(self, rank: int) -> int:
        return sum(run.length for run in self.shares[rank])


@functools.lru_cache(maxsize=64)
def zigzag(length: int, ranks: int) -> Layout:
    """Megatron's get_batch_on_this_cp_rank. Raises ValueError if 2 * ranks do not divide the length."""
    return packed_zigzag(((0, length),), ((0, length),), ranks)


@functools.lru_cache(maxsize=64)
def packed_zigzag(documents: Spans, padded: Spans, ranks: int) -> Layout:
    """Transformer Engine's thd_get_partitioned_indices.

    documents, padded: stream rows of each sequence, without and with trailing padding.

    Raises:
        ValueError: a padded length is not divisible by 2 * ranks.
    """
    for start, stop in padded:
        if (stop - start) % (2 * ranks):
            raise ValueError(
                f"context parallelism: a sequence of {stop - start} rows cannot be split into {2 * ranks} chunks of "
                f"one length for {ranks} ranks; pad it to a multiple of {2 * ranks}"
            )
    shares = []
    for rank in range(ranks):
        chunks = [(start + index * size, size)
                  for start, stop in padded
                  for size in ((stop - start) // (2 * ranks),) for index in (rank, 2 * ranks - 1 - rank)]  # fmt: skip
        shares.append(_share(chunks))
    return Layout(tuple(shares), tuple(span for span in documents if span[1] > span[0]))


def _share(chunks: Sequence[tuple[int, int]]) -> Share:
    runs: list[RowRun] = []
    row = 0
    for start, length in chunks:
        last = runs[-1] if runs else None
        if last and last.start + last.length == start:
            runs[-1] = last._replace(length=last.length + length)
        elif length:
            runs.append(RowRun(row, start, length))
        row += length
    return tuple(runs)


class Gathered(NamedTuple):
    """Joined rows of adjacent ranks.

    layout: over groups of ranks.
    order: for each group, (first row, length) in its concatenated rows, in the order of `layout`.
    """

    layout: Layout
    order: tuple[Spans, ...]


@functools.lru_cache(maxsize=64)
def gathered(layout: Layout, size: int) -> Gathered:
    """Join adjacent ranks: a zigzag over P ranks becomes one over P / size."""
    shares, orders = [], []
    for first in range(0, layout.ranks, size):
        runs, offset = [], 0
        for rank in range(first, first + size):
            runs += [(run.start, offset + run.row, run.length) for run in layout.shares[rank]]
            offset += layout.rows(rank)
        runs.sort()
        shares.append(_share([(start, length) for start, _, length in runs]))
        orders.append(tuple((row, length) for _, row, length in runs))
    return Gathered(Layout(tuple(shares), layout.documents), tuple(orders))


def stream_rows(layout: Layout, rank: int) -> list[int]:
    return [run.start + i for run in layout.shares[rank] for i in range(run.length)]


def in_order(parts: Sequence[Tensor], order: Spans) -> Tensor:
    """Concatenate in `order` (see `Gathered`); no span crosses two tensors."""
    rows = parts[0].shape[0]
    return torch.cat([parts[first // rows][first % rows : first % rows + length] for first, length in order])


def by_rank(t: Tensor, order: Spans, ranks: int) -> list[Tensor]:
    spans, row = {}, 0
    for first, length in order:
        spans[first] = t[row : row + length]
        row += length
    return list(torch.cat([spans[first] for first in sorted(spans)]).chunk(ranks))


class Piece(NamedTuple):
    """q, k: row spans of each sequence, pairwise; band: the mask between them."""

    q: Spans
    k: Spans
    band: Band


class _Product(NamedTuple):
    q: tuple[int, int]
    k: tuple[int, int]
    band: Band


@functools.lru_cache(maxsize=1024)
def pieces(queries: Share, keys: Share, documents: Spans, band: Band) -> tuple[Piece, ...]:
    """Attention calls that a positional mask leaves of one rank's queries and another's keys.

    Between zigzag ranks, a causal mask leaves all queries with the first half of an earlier rank's keys, or the second
    half of the queries with all keys of a later rank.
    """
    slots: dict[tuple[int, Band], list[_Product]] = {}
    for document in documents:
        own, others = _within(queries, document), _within(keys, document)
        for number, product in enumerate(_products(own, others, band)):
            slots.setdefault((number, product.band), []).append(product)
    return tuple(
        Piece(tuple(each.q for each in products), tuple(each.k for each in products), visible)
        for (_, visible), products in slots.items()
    )


def needs(layout: Layout, reader: int, owner: int, band: Band) -> bool:
    """Whether a query of `reader` sees a key of `owner`."""
    return bool(pieces(layout.shares[reader], layout.shares[owner], layout.documents, band))


def _within(share: Share, document: tuple[int, int]) -> list[RowRun]:
    found = []
    for run in share:
        start, stop = max(run.start, document[0]), min(run.start + run.length, document[1])
        if stop > start:
            found.append(RowRun(run.row + start - run.start, start, stop - start))
    return found


def _products(queries: list[RowRun], keys: list[RowRun], band: Band) -> list[_Product]:
    if not queries or not keys:
        return []
    if queries == keys and band in (CAUSAL, FREE):
        # Positions ascend with rows, so one triangle covers all rows.
        rows = queries[0].row, queries[-1].row + queries[-1].length
        if rows[1] - rows[0] == sum(run.length for run in queries):
            return [_Product(rows, rows, band)]
    products: list[_Product] = []
    for query in queries:
        row: list[_Product] = []
        for key in keys:
            product = _product(query, key, band)
            if product is None:
                continue
            last = row[-1] if row else None
            if last and last.band == product.band == FREE and last.q == product.q and last.k[1] == product.k[0]:
                row[-1] = last._replace(k=(last.k[0], product.k[1]))
            else:
                row.append(product)
        last = products[-1] if products else None
        one = row[0] if len(row) == 1 else None
        if one and last and last.band == one.band == FREE and last.k == one.k and last.q[1] == one.q[0]:
            products[-1] = last._replace(q=(last.q[0], one.q[1]))
        else:
            products += row
    return products


def _product(query: RowRun, key: RowRun, band: Band) -> _Product | None:
    left, right = band
    q0, q1, k0, k1 = query.start, query.start + query.length, key.start, key.start + key.length
    if right >= 0:
        q0, k1 = max(q0, k0 - right), min(k1, q1 + right)
    if left >= 0:
        q1, k0 = min(q1, k1 + left), max(k0, q0 - left)
    if q0 >= q1 or k0 >= k1:
        return None
    # Relative to the last query aligned with the last key.
    shift = k1 - q1
    left = FREE[0] if left < 0 or left + shift >= k1 - k0 - 1 else left + shift
    right = FREE[1] if right < 0 or right - shift >= q1 - q0 - 1 else right - shift
    rows, keys = query.row - query.start, key.row - key.start
    return _Product((rows + q0, rows + q1), (keys + k0, keys + k1), (left, right))
