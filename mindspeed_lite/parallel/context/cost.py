"""Chooses the algorithm with the least exposed communication.

A ring overlaps messages with the previous block's compute; other collectives are exposed. The unit of time is a byte on
the link.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_lite.parallel.context.collectives import split_heads

# Attention FLOPs per byte on the link: 400e12 / 450e9 on GPUs within a host (20 times as many between hosts), 150e12
# / 200e9 on NPUs, 5e10 / 1e9 on CPU loopback.
FLOPS_PER_BYTE = {"cuda": 1000.0, "npu": 750.0, "cpu": 50.0}

_SUM_BYTES = 4


class AttentionWork(NamedTuple):
    """Sizes of one attention; rows: of a rank; groups: key heads; itemsize: bytes."""

    rows: int
    batch: int
    heads: int
    groups: int
    size: int
    value_size: int
    itemsize: int
    ranks: int
    causal: bool


class Exposed(NamedTuple):
    """Bytes a rank sends in both passes, and the exposed part."""

    sent: float
    exposed: float


def predict(work: AttentionWork, flops_per_byte: float) -> dict[str, Exposed]:
    """{"ring", "ulysses", "gathered": bytes}; Ulysses only if each rank gets a head."""
    others, elements = work.ranks - 1, work.rows * work.batch * work.groups * (work.size + work.value_size)
    keys, sums = elements * work.itemsize, elements * _SUM_BYTES
    flops = 2 * work.rows**2 * work.batch * work.heads * (work.size + work.value_size) / (2 if work.causal else 1)
    forward, backward = flops / flops_per_byte, 2.5 * flops / flops_per_byte
    # Keys of the next block, and from the third on sums of the previous block.
    sent_back = [keys * (step < others) + sums * (step > 1) for step in range(work.ranks)]
    ring = others * max(0.0, keys - forward) + sum(max(0.0, each - backward) for each in sent_back)
    found = {
        "ring": Exposed(others * (2 * keys + sums), ring + (sums if others else 0)),
        "gathered": Exposed(*[float(others * (2 * keys + sums))] * 2),
    }
    try:
        split_heads(work.heads, work.groups, work.ranks)
    except ValueError:
        return found
    heads = work.heads + max(work.groups, work.ranks)
    sent = 2 * others / work.ranks * work.rows * work.batch * heads * (work.size + work.value_size) * work.itemsize
    return {**found, "ulysses": Exposed(sent, sent)}


def choose(work: AttentionWork, flops_per_byte: float) -> tuple[str, dict[str, Exposed]]:
    """Name with the least exposed bytes, and all predictions."""
    found = predict(work, flops_per_byte)
    return min(found, key=lambda name: (found[name].exposed, found[name].sent)), found
