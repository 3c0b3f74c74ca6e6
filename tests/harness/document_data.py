"""A data set of documents of long-tailed lengths, in Megatron's format, written without Megatron."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

# The token that ends a document: `NullTokenizer` with `--vocab-size 255` has its last one for that.
EOD = 254


@dataclass(frozen=True)
class GeneratedLengths:
    """Lengths in tokens from a Pareto distribution of exponent `tail`, cut at `longest`."""

    shortest: int = 16
    tail: float = 1.4
    longest: int = 8192
    seed: int = 1234

    def draw(self) -> Iterator[int]:
        chance = random.Random(self.seed)
        while True:
            yield min(self.longest, int(self.shortest * chance.paretovariate(self.tail)))


def write(prefix: Path, documents: int, lengths: GeneratedLengths) -> str:
    """Write PREFIX.bin and PREFIX.idx: runs of consecutive numbers below 250 and `EOD`; returns the prefix."""
    sizes = np.array([*islice(lengths.draw(), documents)], dtype=np.int32)
    tokens = (np.arange(sizes.sum()) % 250).astype(np.uint16)
    ends = np.cumsum(sizes, dtype=np.int64)
    tokens[ends - 1] = EOD
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    # Magic, version, code of uint16, numbers of sequences and of document ends; lengths, bytes before each, ends.
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    pointers, numbers = (2 * (ends - sizes)).tobytes(), np.arange(documents + 1, dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(head + sizes.tobytes() + pointers + numbers)
    return str(prefix)
