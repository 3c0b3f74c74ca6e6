"""Which products a block consists of, against the mask itself, pair of positions by pair."""

from __future__ import annotations

import itertools
import random

import pytest

from mindspeed_lite.parallel.context.layout import (
    CAUSAL,
    FREE,
    gathered,
    needs,
    packed_zigzag,
    pieces,
    stream_rows,
    zigzag,
)  # fmt: skip

BANDS = [CAUSAL, FREE, (0, 0), (3, 0), (5, 2), (0, 4), (-1, 2), (40, 40)]


def visible(query, key, documents, band):
    left, right = band
    together = any(start <= query < stop and start <= key < stop for start, stop in documents)
    return together and (left < 0 or key >= query - left) and (right < 0 or key <= query + right)


def pairs(piece):
    """(query row, key row) of every product of a piece that its band leaves."""
    left, right = piece.band
    for (q0, q1), (k0, k1) in zip(piece.q, piece.k, strict=True):
        shift = (k1 - k0) - (q1 - q0)
        for i, j in itertools.product(range(q1 - q0), range(k1 - k0)):
            if (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right):
                yield q0 + i, k0 + j


def check(layout, band, keys=None):
    keys = keys or layout
    for reader, owner in itertools.product(range(layout.ranks), range(keys.ranks)):
        found = [
            pair
            for piece in pieces(layout.shares[reader], keys.shares[owner], layout.documents, band)
            for pair in pairs(piece)
        ]
        own, others = stream_rows(layout, reader), stream_rows(keys, owner)
        wanted = {
            (row, column)
            for (row, query), (column, key) in itertools.product(enumerate(own), enumerate(others))
            if visible(query, key, layout.documents, band)
        }
        assert len(found) == len(set(found)) and set(found) == wanted, (reader, owner, band)
        if keys is layout:
            assert needs(layout, reader, owner, band) == bool(wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_product_once_and_none_that_is_masked(ranks):
    for band in BANDS:
        for chunk in (1, 2, 3):
            layout = zigzag(2 * ranks * chunk, ranks)
            check(layout, band)
            check(layout, band, gathered(layout, ranks).layout)


@pytest.mark.parametrize("seed", range(6))
def test_packs_with_empty_and_short_sequences_and_padding(seed):
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3])
    padded, documents, start = [], [], 0
    for _ in range(draw.randint(1, 5)):
        stop = start + 2 * ranks * draw.choice([0, 1, 2])
        padded.append((start, stop))
        documents.append((start, draw.choice([start, min(start + 1, stop), stop, draw.randint(start, stop)])))
        start = stop
    layout = packed_zigzag(tuple(documents), tuple(padded), ranks)
    for band in BANDS:
        check(layout, band)
        check(layout, band, gathered(layout, ranks).layout)


def test_a_causal_zigzag_computes_half_of_each_block_in_one_call():
    layout = zigzag(32, 4)
    for reader, owner in itertools.product(range(4), range(4)):
        (piece,) = pieces(layout.shares[reader], layout.shares[owner], layout.documents, CAUSAL)
        if reader == owner:
            assert piece == (((0, 8),), ((0, 8),), CAUSAL)
        elif owner < reader:
            assert piece == (((0, 8),), ((0, 4),), FREE)
        else:
            assert piece == (((4, 8),), ((0, 8),), FREE)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_joining_adjacent_ranks_gives_the_zigzag_of_fewer(size):
    layout = zigzag(64, 8)
    joined = gathered(layout, size)
    if size < 8:
        assert joined.layout == zigzag(64, 8 // size)
    for group, order in enumerate(joined.order):
        behind_one_another = [
            row for rank in range(group * size, group * size + size) for row in stream_rows(layout, rank)
        ]
        moved = [behind_one_another[first + i] for first, length in order for i in range(length)]
        assert moved == stream_rows(joined.layout, group) == sorted(moved)


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="a sequence of 10 rows cannot be split into 8 chunks"):
        zigzag(10, 4)
