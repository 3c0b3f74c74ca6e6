"""Blocks that a ring keeps beside a sliding window, against the products that the ring computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_lite.parallel.context import zigzag
from mindspeed_lite.parallel.context.layout import needs
from mindspeed_lite.planner import activations, context, read
from mindspeed_lite.planner.training import TrainingConfig

LIMITS = st.integers(-1, 40)


@given(st.integers(1, 8), st.integers(1, 5), LIMITS, LIMITS)
def test_a_ring_keeps_the_blocks_that_it_computes_with(ranks: int, chunk: int, before: int, after: int) -> None:
    layout, band = zigzag(2 * ranks * chunk, ranks), (before, after)
    computed = [
        sum(needs(layout, rank, owner, band) for owner in range(ranks) if owner != rank) for rank in range(ranks)
    ]
    assert context.blocks_received(ranks, chunk, band) == max(computed)


def training(*words: str) -> TrainingConfig:
    least = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16"
    kept = "--context-parallel-size 4 --context-parallel-kv-cache-policy full"
    return read([*least.split(), *kept.split(), *words], 4)


def received(training: TrainingConfig) -> list[int]:
    """Blocks of 16 rows of keys and values in 16 bits, of each layer."""
    block = 2 * 2 * 16 * 64
    sizes = [sum(each.bytes for each in context.received(training, layer)) for layer in range(4)]
    assert not any(size % block for size in sizes)
    return [size // block for size in sizes]


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        ("", [3, 3, 3, 3]),
        ("--window-size 8,0", [2, 2, 2, 2]),
        ("--window-size (8,0)", [2, 2, 2, 2]),
        ("--window-size 40,0", [3, 3, 3, 3]),
        ("--window-size 8,0 --context-parallel-cache-interval 1", [2, 0, 2, 0]),
        # Every second layer, from 1, and those of 0 see everything.
        ("--window-size 8,0 --window-attn-skip-freq 2", [2, 3, 2, 3]),
        ("--window-size 8,0 --window-attn-skip-freq [0,1]*2", [3, 2, 3, 2]),
        ("--window-attn-skip-freq 2", [3, 3, 3, 3]),
    ],
)
def test_a_window_keeps_fewer(words: str, blocks: list[int]) -> None:
    assert received(training(*words.split())) == blocks


def test_one_rank_of_a_hybrid_s_ring_has_longer_chunks() -> None:
    words = "--ulysses-degree-in-cp 2 --window-size 8,0"
    (entry,) = context.received(training(*words.split()), 0)
    # A ring of two ranks, whose heads are halved and rows doubled.
    assert entry.bytes == 2 * 2 * 16 * 64


def test_attention_of_further_tokens_is_the_first_layer_s() -> None:
    """Megatron counts layers of multi-token prediction from 1 again."""
    further = "--position-embedding-type rope --mtp-num-layers 1 --context-parallel-cache-interval 1"
    found = activations.layer(training(*further.split()), 3, 4, 0, attention=0)
    assert any("received" in each.name for each in found)
