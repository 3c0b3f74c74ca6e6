"""Ring attention: keys and values rotate between ranks during compute.

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
        rank, pair, route = blocks.rank, KVMessage.of(k, v), self._route(blocks)
        own = pair.pack(k, v)
        p2p = RingP2P(rank, self._lanes, {"kv": own})
        p2p.held["kv", rank] = own
        kept: dict[int, Tensor] = {}
        for owner, hops in zip(route.owners[rank], route.kv, strict=True):
            p2p.wait("kv", owner)
            p2p.post(hops)
            if route.needed[rank][owner]:
                message = p2p.held["kv", owner]
                blocks.forward(q, *pair.unpack(message), owner, partial)
                if owner != rank and self.cache != "none":
                    kept[owner] = message if self.cache == "full" else pair.unpack(message)[0].clone()
            p2p.held.pop(("kv", owner), None)
        p2p.finish()
        return kept

    def backward(self, dout: Tensor, saved: tuple[Tensor, ...], kept: Mapping[int, Tensor], blocks: RankBlocks) -> Sums:
        q, k, v, out, lse = saved
        rank, pair, route = blocks.rank, KVMessage.of(k, v), self._route(blocks)
        # With cached keys only values are sent.
        own = v.reshape(-1) if self.cache == "half" else pair.pack(k, v)
        dq, home = zero_sum(q), pair.zero_sums(k)
        p2p = RingP2P(rank, self._lanes, {"kv": own, "sum": home})
        p2p.held["kv", rank] = own
        if self.cache == "full":
            p2p.held |= {("kv", owner): message for owner, message in kept.items()}
        for owner, sums, kv in zip(route.owners[rank], route.sums, route.kv, strict=False):
            p2p.wait("kv", owner)
            p2p.post(sums if self.cache == "full" else (*sums, *kv))
            if route.needed[rank][owner]:
                message = p2p.held["kv", owner]
                if self.cache == "half":
                    keys, values = k if owner == rank else kept[owner], message.view(v.shape)
                else:
                    keys, values = pair.unpack(message)
                block = home if owner == rank else pair.zero_sums(k)
                blocks.backward(dout, q, keys, values, out, lse, owner, Sums(dq, *pair.unpack(block)))
                if owner != rank:
                    p2p.wait("sum", owner)
                    p2p.held["sum", owner] = _added(block, p2p.held.get(("sum", owner)))
            p2p.held.pop(("kv", owner), None)
        p2p.post(route.sums[-1])
        p2p.wait("sum", rank)
        p2p.finish()
        return Sums(dq, *pair.unpack(_added(home, p2p.held.get(("sum", rank)))))

    @property
    def _lanes(self) -> tuple[ProcessGroup, ProcessGroup]:
        return self.group, self.group if self.second is None else self.second

    def _route(self, blocks: RankBlocks) -> RingRoute:
        layout, ranks = blocks.layout, range(blocks.layout.ranks)
        needed = tuple(tuple(needs(layout, reader, owner, blocks.band) for owner in ranks) for reader in ranks)
        return route(needed, self.window)


def _added(block: Tensor, received: Tensor | None) -> Tensor:
    return block if received is None else block.add_(received)


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
    """Asynchronous messages of one pass.

    groups: of lane 0 and lane 1 (see `Hop`).
    likes: for "kv" and "sum", a message like received ones.
    held: ("kv" or "sum", owner) -> message, valid after `wait`.
    """

    def __init__(self, rank: int, groups: Sequence[ProcessGroup], likes: Mapping[str, Tensor]) -> None:
        self._rank, self._groups, self._likes = rank, groups, likes
        self.held: dict[tuple[str, int], Tensor] = {}
        self._coming: dict[tuple[str, int], Any] = {}
        self._going: list[tuple[Tensor, Any]] = []

    def post(self, hops: Sequence[Hop]) -> None:
        """Start this rank's messages of one step; all ranks post the same hops in the same order."""
        self._going = [each for each in self._going if not each[1].is_completed()]
        for lane, group in enumerate(self._groups):
            own = [hop for hop in hops if hop.lane == lane and self._rank in (hop.source, hop.target)]
            if not own:
                continue
            operations, tensors = [], []
            for hop in own:
                key, sends = (hop.what, hop.owner), hop.source == self._rank
                if sends:
                    tensor = self.held[key] if hop.what == "kv" else self.held.pop(key)
                else:
                    tensor = self.held[key] = torch.empty_like(self._likes[hop.what])
                tensors.append(tensor)
                peer = dist.get_global_rank(group, hop.target if sends else hop.source)
                operations.append(dist.P2POp(dist.isend if sends else dist.irecv, tensor, peer, group))
            works = dist.batch_isend_irecv(operations)
            # NCCL and HCCL return a single handle.
            works = works if len(works) == len(own) else works * len(own)
            for hop, tensor, work in zip(own, tensors, works, strict=True):
                if hop.source == self._rank:
                    self._going.append((tensor, work))
                else:
                    self._coming[hop.what, hop.owner] = work

    def wait(self, what: str, owner: int) -> None:
        """Wait for a message, if one was posted."""
        if (what, owner) in self._coming:
            self._coming.pop((what, owner)).wait()

    def finish(self) -> None:
        for _, work in self._going:
            work.wait()
        self._going.clear()


class Hop(NamedTuple):
    """Message with the keys and values of `owner`, or their gradient sum.

    lane: 0 for hops the next block waits for; 1 for longer ones and sums.
    """

    what: Literal["kv", "sum"]
    owner: int
    source: int
    target: int
    lane: int


# needed[reader][owner]: whether a query of `reader` sees a key of `owner`.
Needed = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class RingRoute:
    """Messages of a ring.

    owners: [ranks][steps], whose block a rank computes.
    kv, sums: [steps], started before that step's block; sums have one more step, after the last block.
    """

    needed: Needed
    owners: tuple[tuple[int, ...], ...]
    kv: tuple[tuple[Hop, ...], ...]
    sums: tuple[tuple[Hop, ...], ...]


@functools.lru_cache(maxsize=256)
def route(needed: Needed, window: int = 1) -> RingRoute:
    """Route of a ring (`window` 1 or all ranks) or double ring. Raises ValueError if `window` does not divide `ranks`.

    Keys no later rank needs are not sent. A sum goes from reader to reader, and leaves after the previous step's block.
    """
    ranks = len(needed)
    if window < 1 or ranks % window:
        raise ValueError(f"a double ring's window of {window} ranks does not divide a ring of {ranks} ranks")
    kv: list[list[Hop]] = [[] for _ in range(ranks)]
    sums: list[list[Hop]] = [[] for _ in range(ranks + 1)]
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
            parent = parents[step]
            kv[parent].append(Hop("kv", owner, readers[parent], readers[step], int(step - parent > 1)))
        for step, following in itertools.zip_longest(computing, computing[1:]):
            target = owner if following is None else readers[following]
            sums[step + 1].append(Hop("sum", owner, readers[step], target, 1))
    owners = tuple(_ring_order(ranks, window, rank, -1) for rank in range(ranks))
    return RingRoute(needed, owners, tuple(map(tuple, kv)), tuple(map(tuple, sums)))


def _ring_order(ranks: int, window: int, rank: int, sign: int) -> tuple[int, ...]:
    """Per ring step, the owner of a rank's block (sign -1) or the reader of its own block (sign 1)."""
    windows = ranks // window
    outer, inner = divmod(rank, window)
    return tuple(
        (outer + sign * turn) % windows * window + (inner + sign * hop) % window
        for turn in range(windows)
        for hop in range(window)
    )
