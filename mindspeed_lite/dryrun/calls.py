"""What a rank calls of `torch.distributed`; imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

SENDS, RECEIVES = ("send", "isend", "send_object_list"), ("recv", "irecv", "recv_object_list")
# Megatron's name of the group of a pipeline's stages.
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"


@dataclass(frozen=True)
class GroupCall:
    """One call of a rank.

    group: global ranks. kind: function of `torch.distributed`. size: elements that this rank sends, or receives.
    peer: global rank of a send, a receive or a root, else -1. sent, received: elements by member of an all-to-all.
    where: file and line of the caller.
    """

    group: tuple[int, ...]
    kind: str
    dtype: str = ""
    size: int = 0
    peer: int = -1
    is_async: bool = False
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    where: str = ""

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits[0]) // 8) if bits else 1
