"""What a device needs besides the tensors of a dry run: published measurements, and one assumption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank import RankResult

_MB = 1e6
# On an H100 before its first all-to-all, without torch's tensors: github.com/NVIDIA/nccl/issues/1685.
CONTEXT = 1060 * _MB
# Of a communicator of two ranks, and of more, on A100s: github.com/NVIDIA/nccl/issues/964. An all-to-all opens
# channels between all pairs: 3.3 GB of 8 H100s, nccl/issues/1685; messages to other nodes share buffers.
NCCL_PAIR, NCCL, NCCL_ALL_TO_ALL = 544 * _MB, 688 * _MB, 3280 * _MB
# Twice HCCL_BUFFSIZE, in MB: hiascend.com, HCCL environment variables.
HCCL_BUFFSIZE = 200.0
# Of all tensors, for fragments and temporary tensors: assumed.
FRAGMENTS = 0.05


def needed(rank: RankResult, kind: str, environment: Mapping[str, str], tensors: int) -> dict[str, float]:
    """Bytes by what takes them. tensors: bytes of all of them; communicators are those of groups that had messages."""
    groups = {each.group for each in rank.messages if len(each.group) > 1}
    if kind == "npu":
        text = environment.get("HCCL_BUFFSIZE", "")
        communicators = len(groups) * 2 * (float(text) if text.isdecimal() else HCCL_BUFFSIZE) * _MB
    else:
        exchanging = {each.group for each in rank.messages if each.kind.startswith("all_to_all")}
        communicators = sum(
            NCCL_ALL_TO_ALL if each in exchanging else NCCL_PAIR if len(each) == 2 else NCCL for each in groups
        )
    return {
        "context": CONTEXT, f"buffers of {len(groups)} communicators": communicators,
        "fragments and temporary tensors": tensors * FRAGMENTS,
    }  # fmt: skip
