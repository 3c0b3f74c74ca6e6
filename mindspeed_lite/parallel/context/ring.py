"""Ring attention: keys and values rotate between ranks during compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.context import schedule
from mindspeed_lite.parallel.context.blocks import Partial, RankBlocks, Sums, sum_dtype, zero_sum
from mindspeed_lite.parallel.context.layout import needs
from mindspeed_lite.parallel.context.schedule import Move

Cache = Literal["none", "half", "full"]
# ("kv" or "sum", owner) -> message.
_Held = dict[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class Ring:
    """Ring communication; a `KeyExchange`.

    group: ranks in sequence order.
    second: another group of the same ranks, so that sums and outer hops do not wait for inner hops.
    window: ranks of an inner ring; 1 is a single ring.
    cache: received tensors kept for backward: none, keys, or keys and values.
    """

    group: dist.ProcessGroup
    second: dist.ProcessGroup | None = None
    window: int = 1
    cache: Cache = "none"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: RankBlocks, partial: Partial
    ) -> dict[int, torch.Tensor]:
        rank, pair = blocks.rank, KVMessage.of(k, v)
        own = pair.pack(k, v)
        p2p = RingP2P(self._lanes, {"kv": own})
        held: _Held = {("kv", rank): own}
        kept: dict[int, torch.Tensor] = {}
        for step in self._program(blocks).forward:
            message = _arrive(p2p, held, step)
            if step.computes:
                blocks.forward(q, *pair.unpack(message), step.owner, partial)
                if step.owner != rank and self.cache != "none":
                    kept[step.owner] = message if self.cache == "full" else pair.unpack(message)[0].clone()
            if step.owner != rank:
                held.pop(("kv", step.owner), None)
        p2p.finish()
        return kept

    def backward(
        self,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        kept: Mapping[int, torch.Tensor],
        blocks: RankBlocks,
    ) -> Sums:
        q, k, v, out, lse = saved
        rank, pair = blocks.rank, KVMessage.of(k, v)
        # With cached keys only values are sent.
        own = v.reshape(-1) if self.cache == "half" else pair.pack(k, v)
        dq, home = zero_sum(q), pair.zero_sums(k)
        p2p = RingP2P(self._lanes, {"kv": own, "sum": home})
        held: _Held = {("kv", rank): own}
        if self.cache == "full":
            held |= {("kv", owner): message for owner, message in kept.items()}
        program = self._program(blocks)
        for step in program.backward:
            message = _arrive(p2p, held, step)
            if step.computes:
                if self.cache == "half":
                    keys, values = k if step.owner == rank else kept[step.owner], message.view(v.shape)
                else:
                    keys, values = pair.unpack(message)
                block = home if step.owner == rank else pair.zero_sums(k)
                blocks.backward(dout, q, keys, values, out, lse, step.owner, Sums(dq, *pair.unpack(block)))
                if step.owner != rank:
                    held["sum", step.owner] = block.add_(p2p.take("sum", step.owner)) if step.receives_sum else block
            if step.owner != rank:
                held.pop(("kv", step.owner), None)
        p2p.post(program.last, held)
        if p2p.expects("sum", rank):
            home += p2p.take("sum", rank)
        p2p.finish()
        return Sums(dq, *pair.unpack(home))

    @property
    def _lanes(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return self.group, self.group if self.second is None else self.second

    def _program(self, blocks: RankBlocks) -> schedule.Program:
        layout, ranks = blocks.layout, range(blocks.layout.ranks)
        needed = tuple(tuple(needs(layout, reader, owner, blocks.band) for owner in ranks) for reader in ranks)
        return schedule.programs(layout.ranks, self.window, needed, self.cache != "full")[blocks.rank]


def _arrive(p2p: RingP2P, held: _Held, step: schedule.RingStep) -> torch.Tensor:
    if p2p.expects("kv", step.owner):
        held["kv", step.owner] = p2p.take("kv", step.owner)
    p2p.post(step.moves, held)
    for move in step.moves:
        if move.what == "sum" and move.direction == "send":
            del held["sum", move.owner]
    return held.get(("kv", step.owner))  # type: ignore[return-value]  # None for a block that no query sees


class KVMessage(NamedTuple):
    keys: torch.Size
    values: torch.Size

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> KVMessage:
        return cls(k.shape, v.shape)

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.split_with_sizes(message, [self.keys.numel(), self.values.numel()])
        return keys.view(self.keys), values.view(self.values)

    def zero_sums(self, like: torch.Tensor) -> torch.Tensor:
        size = self.keys.numel() + self.values.numel()
        return torch.zeros(size, dtype=sum_dtype(like.dtype), device=like.device)


class RingP2P:
    """Asynchronous neighbour messages of one pass.

    groups: of lane 0 and lane 1 (see `schedule.Move`).
    likes: for "kv" and "sum", a message like received ones.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], likes: Mapping[str, torch.Tensor]) -> None:
        self._groups, self._likes = groups, likes
        self._coming: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        self._going: list[tuple[torch.Tensor, Any]] = []

    def post(self, moves: Sequence[Move], held: Mapping[tuple[str, int], torch.Tensor]) -> None:
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
            # NCCL and HCCL return a single handle.
            works = works if len(works) == len(chosen) else works * len(chosen)
            for move, tensor, work in zip(chosen, tensors, works, strict=True):
                if move.direction == "send":
                    self._going.append((tensor, work))
                else:
                    self._coming[move.what, move.owner] = tensor, work

    def expects(self, what: str, owner: int) -> bool:
        return (what, owner) in self._coming

    def take(self, what: str, owner: int) -> torch.Tensor:
        tensor, work = self._coming.pop((what, owner))
        work.wait()
        return tensor

    def finish(self) -> None:
        for _, work in self._going:
            work.wait()
        self._going.clear()
