"""Whether ranks have equal attention work on packs of real lengths: why no algorithm reorders tokens for it.

Documents are the help texts of Python's standard library, a word being a token, packed to 8192 tokens.
"""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import pytest

from mindspeed_lite.parallel.context.layout import Layout, Spans, packed_zigzag

LENGTH, PACKS = 8192, 100
LENGTHS = [len(text.split()) for text in topics.values()]


def pack(chosen: random.Random, ranks: int) -> tuple[Spans, Spans]:
    """(documents, the same with their padding) of one pack."""
    documents, padded, at = [], [], 0
    while at < LENGTH:
        length = min(chosen.choice(LENGTHS), LENGTH - at)
        stop = at + -(-length // (2 * ranks)) * 2 * ranks
        documents.append((at, at + length))
        padded.append((at, stop))
        at = stop
    return tuple(documents), tuple(padded)


def imbalance(layout: Layout) -> float:
    """The most pairs of query and key that a rank computes under a causal mask, over the mean."""
    work = []
    for share in layout.shares:
        total = 0
        for run in share:
            for start, stop in layout.documents:
                first, last = max(run.start, start), min(run.start + run.length, stop)
                # Query i of a document sees i + 1 keys.
                total += max(0, last - first) * (first + last + 1 - 2 * start) // 2
        work.append(total)
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize(("ranks", "allowed"), [(2, 1.01), (4, 1.02), (8, 1.03)])
def test_a_pack_split_sequence_by_sequence_is_balanced(ranks: int, allowed: float) -> None:
    chosen = random.Random(ranks)
    packs = [pack(chosen, ranks) for _ in range(PACKS)]
    assert max(imbalance(packed_zigzag(*each, ranks)) for each in packs) < allowed
    # Split as one sequence the same packs are far from it: the measure tells them apart.
    whole = [Layout(packed_zigzag((span,), (span,), ranks).shares, each[0]) for each in packs for span in [(0, LENGTH)]]
    assert sum(map(imbalance, whole)) / PACKS > 1.15
