"""Names of choices."""

import enum


class CPLoadBalancingStrategy(enum.Enum):
    """How ranks of context parallelism share a sequence."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
