"""Chooses the algorithm that exposes the least communication, from bytes and operations.

A ring overlaps a block's keys and values with the products of the block before; all-to-alls and gathers overlap with
nothing. Time is measured in bytes that the link sends meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_lite.parallel.context.ulysses import split_heads

# Floating point operations of attention while the link sends one byte. 400e12 over 450e9 on GPUs within a host, 20
# times as many between hosts; 150e12 over 200e9 on NPUs; 5e10 over 1e9 on a CPU's loopback.
FLOPS_PER_BYTE = {"cuda": 1000.0, "npu": 750.0, "cpu": 50.0}

_SUM_BYTES = 4


class AttentionWork(NamedTuple):
    """The sizes of one attention; rows: of a rank; groups: key heads; itemsize: bytes."""

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
    """Bytes that a rank sends in both passes, and those of them that nothing overlaps with."""

    sent: float
    exposed: float


def predict(work: AttentionWork, flops_per_byte: float) -> dict[str, Exposed]:
    """{"ring", "ulysses", "gathered": bytes}; Ulysses only where each rank gets a head."""
    others, elements = work.ranks - 1, work.rows * work.batch * work.groups * (work.size + work.value_size)
    keys, sums = elements * work.itemsize, elements * _SUM_BYTES
    flops = 2 * work.rows**2 * work.batch * work.heads * (work.size + work.value_size) / (2 if work.causal else 1)
    forward, backward = flops / flops_per_byte, 2.5 * flops / flops_per_byte
    # During each block of the backward pass: the keys of the next, and from the third on the sums of the one before.
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
    """The name with the least exposed bytes, and all predictions."""
    found = predict(work, flops_per_byte)
    return min(found, key=lambda name: (found[name].exposed, found[name].sent)), found
