"""Which products of queries and keys the block of two ranks consists of: only those that a mask by position leaves.

A piece is one call of attention's halves: a span of query rows and one of key rows for each sequence, and a band of
positions. Between two ranks of a zigzag a causal mask leaves half of the block without any masking (all queries and
the first half of an earlier rank's keys; the second half of the queries and all keys of a later rank), and a triangle
on the diagonal.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from mindspeed_lite.parallel.context.layout import Layout, RowRun, Share, Spans

# (left, right) as in `ops.attention.band`: the last query stands at the last key, -1 is no limit.
Band = tuple[int, int]
CAUSAL: Band = (-1, 0)
FREE: Band = (-1, -1)


class Piece(NamedTuple):
    """q, k: rows of each sequence, in order and pairwise; band: what each query sees of its keys."""

    q: Spans
    k: Spans
    band: Band


class _Product(NamedTuple):
    q: tuple[int, int]
    k: tuple[int, int]
    band: Band


@functools.lru_cache(maxsize=1024)
def pieces(queries: Share, keys: Share, documents: Spans, band: Band) -> tuple[Piece, ...]:
    """The pieces of one rank's queries and another's keys; empty if no query sees a key.

    Args:
        queries, keys: the rows of either.
        documents: spans of the stream that see themselves only.
        band: (left, right), the keys that a query sees before its own position and after it; -1 is no limit.
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
    """A share's runs, cut to a document."""
    found = []
    for run in share:
        start, stop = max(run.start, document[0]), min(run.start + run.length, document[1])
        if stop > start:
            found.append(RowRun(run.row + start - run.start, start, stop - start))
    return found


def _products(queries: list[RowRun], keys: list[RowRun], band: Band) -> list[_Product]:
    """The products of one sequence, as few as possible."""
    if not queries or not keys:
        return []
    if queries == keys and band in (CAUSAL, FREE):
        # Positions ascend with rows, so one triangle over all rows is that of the positions.
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
    """What a run of queries sees of a run of keys, or None; rows and keys that see nothing are cut off."""
    left, right = band
    # Positions, each from the first to behind the last.
    q0, q1, k0, k1 = query.start, query.start + query.length, key.start, key.start + key.length
    if right >= 0:
        q0, k1 = max(q0, k0 - right), min(k1, q1 + right)
    if left >= 0:
        q1, k0 = min(q1, k1 + left), max(k0, q0 - left)
    if q0 >= q1 or k0 >= k1:
        return None
    # From distances of positions to the last query standing at the last key; limits that hide nothing are dropped.
    shift = k1 - q1
    left = FREE[0] if left < 0 or left + shift >= k1 - k0 - 1 else left + shift
    right = FREE[1] if right < 0 or right - shift >= q1 - q0 - 1 else right - shift
    rows, keys = query.row - query.start, key.row - key.start
    return _Product((rows + q0, rows + q1), (keys + k0, keys + k1), (left, right))
