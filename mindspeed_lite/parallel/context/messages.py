"""Messages of a ring: what is sent is contiguous, what comes is waited for where it is needed, and no earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.context.schedule import Move


class Pair(NamedTuple):
    """Keys and values as one message: [numbers of k, numbers of v], flat."""

    keys: torch.Size
    values: torch.Size

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> Pair:
        return cls(k.shape, v.shape)

    def message(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Both, copied behind one another."""
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def of_message(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both."""
        keys, values = torch.split_with_sizes(message, [self.keys.numel(), self.values.numel()])
        return keys.view(self.keys), values.view(self.values)

    def zero_sums(self, like: torch.Tensor) -> torch.Tensor:
        """A message of zeros in the dtype of sums."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.zeros(self.keys.numel() + self.values.numel(), dtype=dtype, device=like.device)


class Mail:
    """The messages of one pass on one rank.

    groups: of lane 0 and lane 1 (see `schedule.Move`).
    likes: for "kv" and "sum", a message of the size and dtype of those that come.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], likes: Mapping[str, torch.Tensor]) -> None:
        self._groups, self._likes = groups, likes
        self._coming: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        self._going: list[tuple[torch.Tensor, Any]] = []

    def post(self, moves: Sequence[Move], held: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Start these messages; `held` has what is sent and has not come through this mail."""
        self._going = [each for each in self._going if not each[1].is_completed()]
        for lane, group in enumerate(self._groups):
            chosen = [move for move in moves if move.lane == lane]
            if not chosen:
                continue
            operations, tensors = [], []
            for move in chosen:
                sends = move.direction == "send"
                tensor = held[move.what, move.owner] if sends else torch.empty_like(self._likes[move.what])
                tensors.append(tensor)
                peer = dist.get_global_rank(group, move.peer)
                operations.append(dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer, group))
            works = dist.batch_isend_irecv(operations)
            # NCCL and HCCL give one handle for all.
            works = works if len(works) == len(chosen) else works * len(chosen)
            for move, tensor, work in zip(chosen, tensors, works, strict=True):
                if move.direction == "send":
                    self._going.append((tensor, work))
                else:
                    self._coming[move.what, move.owner] = tensor, work

    def expects(self, what: str, owner: int) -> bool:
        """Whether such a message was announced and not taken yet."""
        return (what, owner) in self._coming

    def take(self, what: str, owner: int) -> torch.Tensor:
        """Wait for a message."""
        tensor, work = self._coming.pop((what, owner))
        work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until everything sent is on its way."""
        for _, work in self._going:
            work.wait()
        self._going.clear()
