"""A data set of documents of long-tailed lengths, in Megatron's format."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mindspeed_lite.parallel.balance.length_simulation import GeneratedLengths


def write(prefix: Path, documents: int, longest: int, seed: int = 1) -> str:
    """Write PREFIX.bin and PREFIX.idx, runs of consecutive numbers below 250; returns the prefix."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    lengths = GeneratedLengths(4, 1.2, longest, seed).draw()
    for first, length in enumerate(islice(lengths, documents)):
        builder.add_document(torch.arange(first, first + length) % 250, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
