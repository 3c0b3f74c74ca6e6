"""Which rows of a sequence each context-parallel rank holds, in plain numbers.

A stream is the whole sequence, or the sequences of a pack behind one another. A rank holds *runs* of it. Megatron's
and Transformer Engine's split is the zigzag: each sequence is cut into 2P chunks, and rank r holds the chunks r and
2P - 1 - r, which gives every rank the same work under a causal mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Spans = tuple[tuple[int, int], ...]


class RowRun(NamedTuple):
    """Rows `row` to `row + length` of a rank, which are the stream's from `start` on."""

    row: int
    start: int
    length: int


Share = tuple[RowRun, ...]


@dataclass(frozen=True)
class Layout:
    """shares: the runs of each rank, ascending in rows and in the stream.

    documents: spans of the stream that see themselves only, ascending; rows outside of them are padding.
    """

    shares: tuple[Share, ...]
    documents: Spans

    @property
    def ranks(self) -> int:
        return len(self.shares)

    def rows(self, rank: int) -> int:
        """How many rows a rank holds."""
        return sum(run.length for run in self.shares[rank])


@functools.lru_cache(maxsize=64)
def zigzag(length: int, ranks: int) -> Layout:
    """One sequence, split as Megatron's get_batch_on_this_cp_rank does.

    Raises:
        ValueError: the length is not divisible by 2 * ranks.
    """
    return packed_zigzag(((0, length),), ((0, length),), ranks)


@functools.lru_cache(maxsize=64)
def packed_zigzag(documents: Spans, padded: Spans, ranks: int) -> Layout:
    """Each sequence of a pack split by itself, as Transformer Engine's thd_get_partitioned_indices does.

    Args:
        documents: the rows of each sequence in the stream, without padding.
        padded: the same with the padding behind each sequence; these tile the stream.

    Raises:
        ValueError: a padded length is not divisible by 2 * ranks.
    """
    for start, stop in padded:
        if (stop - start) % (2 * ranks):
            raise ValueError(
                f"context parallelism: a sequence of {stop - start} rows cannot be split into {2 * ranks} chunks of "
                f"one length for {ranks} ranks; pad it to a multiple of {2 * ranks}"
            )
    shares = tuple(_zigzag_share(padded, rank, ranks) for rank in range(ranks))
    return Layout(shares, tuple(span for span in documents if span[1] > span[0]))


def _zigzag_share(padded: Spans, rank: int, ranks: int) -> Share:
    runs, row = [], 0
    for start, stop in padded:
        chunk = (stop - start) // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            if chunk:
                runs.append(RowRun(row, start + index * chunk, chunk))
                row += chunk
    return _joined(runs)


def _joined(runs: Sequence[RowRun]) -> Share:
    """Adjacent runs as one."""
    joined: list[RowRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.row + last.length == run.row and last.start + last.length == run.start:
            joined[-1] = RowRun(last.row, last.start, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


class Gathered(NamedTuple):
    """What `size` adjacent ranks hold together.

    layout: the layout over ranks / size groups of ranks.
    order: for each group, (first row, length) among its ranks' rows behind one another, in the order of `layout`.
    """

    layout: Layout
    order: tuple[Spans, ...]


@functools.lru_cache(maxsize=64)
def gathered(layout: Layout, size: int) -> Gathered:
    """Join the rows of `size` adjacent ranks and put them in the order of the stream.

    A zigzag over P ranks becomes one over P / size: chunks r * size to (r + 1) * size are adjacent, and so are their
    counterparts.
    """
    shares, orders = [], []
    for first in range(0, layout.ranks, size):
        runs, offset = [], 0
        for rank in range(first, first + size):
            runs += [(run.start, offset + run.row, run.length) for run in layout.shares[rank]]
            offset += layout.rows(rank)
        row, share = 0, []
        for start, _, length in sorted(runs):
            share.append(RowRun(row, start, length))
            row += length
        shares.append(_joined(share))
        orders.append(tuple((where, length) for _, where, length in sorted(runs)))
    return Gathered(Layout(tuple(shares), layout.documents), tuple(orders))


def stream_rows(layout: Layout, rank: int) -> list[int]:
    """The stream's row for each row of a rank."""
    return [run.start + i for run in layout.shares[rank] for i in range(run.length)]
