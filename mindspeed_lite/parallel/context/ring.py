"""Ring attention: keys and values rotate between ranks during compute, by a list of steps for each rank.

Keys and values of a block travel during the previous block. In backward the owner's gradient sum follows: each rank
adds its block's, the last one returns it. A double ring rotates within windows of `window` adjacent ranks; the hop to
the next window overlaps with a whole inner rotation, for slow links between hosts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_lite.parallel.context.blocks import Partial, RankBlocks, Sums, sum_dtype, zero_sum
from mindspeed_lite.parallel.context.layout import needs

Cache = Literal["none", "half", "full"]
# ("kv" or "sum", owner) -> message.
_Held = dict[tuple[str, int], Tensor]


@dataclass(frozen=True)
class Ring:
    """Ring communication.

    group: ranks in sequence order.
    second: another group of the same ranks, so that sums and outer hops do not wait for inner hops.
    window: ranks of an inner ring; 1 is a single ring.
    cache: received tensors kept for backward: none, keys, or keys and values.
    """

    group: ProcessGroup
    second: ProcessGroup | None = None
    window: int = 1
    cache: Cache = "none"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: RankBlocks, partial: Partial) -> dict[int, Tensor]:
        rank, pair = blocks.rank, KVMessage.of(k, v)
        own = pair.pack(k, v)
        p2p = RingP2P(self._lanes, {"kv": own})
        held: _Held = {("kv", rank): own}
        kept: dict[int, Tensor] = {}
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

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...], kept: Mapping[int, Tensor], blocks: RankBlocks) -> Sums:
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
    def _lanes(self) -> tuple[ProcessGroup, ProcessGroup]:
        return self.group, self.group if self.second is None else self.second

    def _program(self, blocks: RankBlocks) -> Program:
        layout, ranks = blocks.layout, range(blocks.layout.ranks)
        needed = tuple(tuple(needs(layout, reader, owner, blocks.band) for owner in ranks) for reader in ranks)
        return programs(layout.ranks, self.window, needed, self.cache != "full")[blocks.rank]


def _arrive(p2p: RingP2P, held: _Held, step: RingStep) -> Tensor:
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
    def of(cls, k: Tensor, v: Tensor) -> KVMessage:
        return cls(k.shape, v.shape)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = torch.split_with_sizes(message, [self.keys.numel(), self.values.numel()])
        return keys.view(self.keys), values.view(self.values)

    def zero_sums(self, like: Tensor) -> Tensor:
        size = self.keys.numel() + self.values.numel()
        return torch.zeros(size, dtype=sum_dtype(like.dtype), device=like.device)


class RingP2P:
    """Asynchronous neighbour messages of one pass.

    groups: of lane 0 and lane 1 (see `Move`).
    likes: for "kv" and "sum", a message like received ones.
    """

    def __init__(self, groups: Sequence[ProcessGroup], likes: Mapping[str, Tensor]) -> None:
        self._groups, self._likes = groups, likes
        self._coming: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        self._going: list[tuple[Tensor, Any]] = []

    def post(self, moves: Sequence[Move], held: Mapping[tuple[str, int], Tensor]) -> None:
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

    def take(self, what: str, owner: int) -> Tensor:
        tensor, work = self._coming.pop((what, owner))
        work.wait()
        return tensor

    def finish(self) -> None:
        for _, work in self._going:
            work.wait()
        self._going.clear()


class Move(NamedTuple):
    """Keys and values of `owner`, or their gradient sum.

    lane: 0 for hops the next block waits for; 1 for longer ones and sums.
    """

    what: Literal["kv", "sum"]
    direction: Literal["send", "receive"]
    owner: int
    peer: int
    lane: int


@dataclass(frozen=True)
class RingStep:
    """Messages to start, then the block of `owner`.

    moves: in the posting order of both sides.
    computes: whether any of the owner's keys is visible.
    receives_sum: adds to a received sum.
    """

    moves: tuple[Move, ...]
    owner: int
    computes: bool
    receives_sum: bool = False


@dataclass(frozen=True)
class Program:
    """Steps of one rank; `last`: moves after the last backward block."""

    rank: int
    forward: tuple[RingStep, ...]
    backward: tuple[RingStep, ...]
    last: tuple[Move, ...]


# needed[reader][owner]: whether a query of `reader` sees a key of `owner`.
Needed = tuple[tuple[bool, ...], ...]
# (step, rank) -> messages to start.
_Moves = dict[tuple[int, int], tuple[Move, ...]]


@functools.lru_cache(maxsize=256)
def programs(ranks: int, window: int = 1, needed: Needed | None = None, kv_again: bool = True) -> tuple[Program, ...]:
    """Programs of a ring (`window` 1 or `ranks`) or double ring.

    Args:
        window: ranks of an inner ring.
        needed: blocks to compute, default all; keys no later rank needs are not sent.
        kv_again: send keys and values in backward too; False if cached.

    Raises:
        ValueError: `window` does not divide `ranks`.
    """
    if window < 1 or ranks % window:
        raise ValueError(f"a double ring's window of {window} ranks does not divide a ring of {ranks} ranks")
    needed = needed or ((True,) * ranks,) * ranks
    kv, sums, added = _moves(ranks, window, needed)
    made = []
    for rank in range(ranks):
        forward, backward = [], []
        for number, owner in enumerate(_ring_order(ranks, window, rank, -1)):
            computes, moves = needed[rank][owner], kv.get((number, rank), ())
            forward.append(RingStep(moves, owner, computes))
            moves = (*sums.get((number, rank), ()), *(moves if kv_again else ()))
            backward.append(RingStep(moves, owner, computes, (rank, owner) in added))
        made.append(Program(rank, tuple(forward), tuple(backward), sums.get((ranks, rank), ())))
    return tuple(made)


def _ring_order(ranks: int, window: int, rank: int, sign: int) -> list[int]:
    """By step: owners of a rank's blocks (sign -1), readers of an owner's block (sign 1)."""
    windows = ranks // window
    outer, inner = divmod(rank, window)
    return [
        (outer + sign * turn) % windows * window + (inner + sign * hop) % window
        for turn in range(windows)
        for hop in range(window)
    ]


def _moves(ranks: int, window: int, needed: Needed) -> tuple[_Moves, _Moves, set[tuple[int, int]]]:
    """(KV hops, sum hops, (reader, owner) that adds to a received sum).

    A sum leaves after the previous step's block; step `ranks` is the end of the pass.
    """
    kv: _Moves = {}
    sums: _Moves = {}
    added: set[tuple[int, int]] = set()
    for owner in range(ranks):
        readers = _ring_order(ranks, window, owner, 1)
        computing = [step for step, reader in enumerate(readers) if step and needed[reader][owner]]
        # The previous hop in the window, or the previous window.
        parents = {step: step - 1 if step % window else step - window for step in range(1, ranks)}
        wanted = set(computing)
        for step in range(ranks - 1, 0, -1):
            if step in wanted:
                wanted.add(parents[step])
        for step in sorted(wanted - {0}):
            lane = int(step - parents[step] > 1)
            _put(kv, parents[step], owner, (readers[parents[step]], readers[step]), "kv", lane)
        for step, following in itertools.zip_longest(computing, computing[1:]):
            target = owner if following is None else readers[following]
            _put(sums, step + 1, owner, (readers[step], target), "sum", 1)
        added |= {(readers[step], owner) for step in computing[1:]}
    return kv, sums, added


def _put(moves: _Moves, step: int, owner: int, hop: tuple[int, int], what: Literal["kv", "sum"], lane: int) -> None:
    source, target = hop
    moves[step, source] = (*moves.get((step, source), ()), Move(what, "send", owner, target, lane))
    moves[step, target] = (*moves.get((step, target), ()), Move(what, "receive", owner, source, lane))
