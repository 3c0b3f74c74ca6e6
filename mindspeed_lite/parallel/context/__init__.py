"""Context-parallel attention: ring, Ulysses, both, or gathered keys.

layout          rows of each rank, blocks left by a positional mask
blocks          attention over one rank's keys at a time
ring            messages of a ring, and their execution
collectives     all-gathered keys and values; Ulysses' all-to-alls between rows and heads
cost            exposed communication
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_lite.ops import attention as op
from mindspeed_lite.ops.attention import band as bands
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.parallel.context.blocks import Dropout, RankBlocks
from mindspeed_lite.parallel.context.blocks import attend as attend_blocks
from mindspeed_lite.parallel.context.collectives import GatheredKeys, gather_keys, split_heads, to_heads, to_rows
from mindspeed_lite.parallel.context.layout import Band, Layout, gathered, packed_zigzag, stream_rows, zigzag
from mindspeed_lite.parallel.context.ring import Ring

__all__ = ["Algorithm", "Layout", "Ring", "UnequalLengthsError", "attend", "attend_masked", "packed_zigzag", "zigzag"]

# Groups whose ranks have compared lengths.
_compared: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class UnequalLengthsError(RuntimeError):
    """Ranks of one group have sequences of different lengths."""


@dataclass(frozen=True)
class Algorithm:
    """Context-parallel algorithm: `ulysses`, `ring` or `gathered`, or `ulysses` with another.

    ulysses: adjacent ranks that share heads.
    ring, gathered: ranks that share the sequence; with `ulysses`, those of the same place in their Ulysses groups.
    gather_keys: Ulysses gathers all key heads instead.
    """

    ulysses: ProcessGroup | None = None
    ring: Ring | None = None
    gathered: ProcessGroup | None = None
    gather_keys: bool = False

    @property
    def outer(self) -> ProcessGroup | None:
        return self.ring.group if self.ring else self.gathered

    @property
    def ranks(self) -> int:
        return (self.outer.size() if self.outer else 1) * (self.ulysses.size() if self.ulysses else 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    algorithm: Algorithm,
    *,
    band: Band = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the whole sequence for this rank's rows; differentiable in q, k, v, sink.

    q: [s, b, n, d], k: [s, b, g, d], v: [s, b, g, dv] with this rank's s rows; for a pack [t, n, d], [t, g, d] and [t,
        g, dv]. Returns [s, b, n, dv] or [t, n, dv] in q's dtype; padding rows are 0.

    band: see `layout.Band`; (-1, 0) is causal.
    scale: 1 / sqrt(d) by default.
    dropout_p: drawn by position from the device's default generator; with equal seeds all algorithms drop the same.
    sink: [n], one logit per head that takes weight but adds no value.

    Raises:
        ValueError: rows or ranks do not match the layout, or fewer heads than Ulysses ranks.
        UnequalLengthsError: sequences of different lengths.
    """
    if algorithm.ranks != layout.ranks:
        raise ValueError(f"context parallelism: a layout of {layout.ranks} ranks over groups of {algorithm.ranks}")
    if not q.shape[0] == k.shape[0] == v.shape[0] == layout.rows(0):
        raise ValueError(
            f"context parallelism: {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values on a rank that has "
            f"{layout.rows(0)} rows; all ranks must have batches of one length"
        )
    for group in (algorithm.ulysses, algorithm.outer):
        if group is not None:
            _compare_lengths(q, k, group)
    is_pack, heads, first_head = q.dim() == 3, q.shape[-2], 0
    # Drawn before heads are split: equal on all ranks.
    seed = torch.randint(1 << 62, (), device=q.device) if dropout_p > 0.0 else None
    outer_rank = 0 if algorithm.outer is None else algorithm.outer.rank()
    exchange, order, split = algorithm.ulysses, None, None
    if exchange is not None:
        split = split_heads(heads, k.shape[-2], exchange.size())
        layout, orders = gathered(layout, exchange.size())
        order = orders[outer_rank]
        q, k, v = to_heads(q, k, v, exchange, order, gather_keys=algorithm.gather_keys)
        first_head, end = split.q[exchange.rank()]
        sink = None if sink is None else sink[first_head:end]
    if layout.ranks == 1 and seed is None:
        out = _attend_alone(q, k, v, layout, band, scale, sink)
    else:
        dropout = None if seed is None else Dropout(dropout_p, seed, first_head, heads)
        blocks = RankBlocks(layout, outer_rank, band, scale, is_pack, dropout)
        # A single rank sends nothing.
        ring = algorithm.ring or Ring(exchange)  # type: ignore[arg-type]
        keys = ring if algorithm.gathered is None else GatheredKeys(algorithm.gathered)
        if is_pack:
            q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        out = attend_blocks(q, k, v, sink, blocks, keys)
        out = out.squeeze(1) if is_pack else out
    if exchange is None:
        return out
    assert order is not None and split is not None
    return to_rows(out, exchange, order, split.q)


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    group: ProcessGroup,
    mask: Tensor,
    *,
    window: Band | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """`attend` under any mask, with gathered keys and values.

    mask: bool, True hides the key, [b or 1, n or 1, s or 1, total keys]: queries in rank order, keys in sequence order.
    window: an additional band.

    Raises:
        ValueError: the mask does not fit.
    """
    _compare_lengths(q, k, group)
    keys, values = gather_keys(k, v, layout, group)
    if window is not None:
        length = keys.shape[0]
        rows = torch.tensor(stream_rows(layout, group.rank()), device=mask.device)
        mask = mask | bands.hidden(length, length, window, mask.device).index_select(0, rows)
    spec = op.prepare(q, keys, values, mask=mask, scale=scale, dropout_p=dropout_p, sink=sink)
    return op.attend(q, keys, values, spec)


def _attend_alone(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, band: Band, scale: float | None, sink: Tensor | None
) -> Tensor:
    if q.dim() == 4:
        return op.attend(q, k, v, op.prepare(q, k, v, window=band, scale=scale, sink=sink))
    packing = packed.Packing(layout.documents, layout.documents)
    return packed.attend(q, k, v, packing, packed.prepare(q, k, v, packing, window=band, scale=scale, sink=sink))


def _compare_lengths(q: Tensor, k: Tensor, group: ProcessGroup) -> None:
    """Compare lengths: on CPU always, on a device in a group's first call. Raises UnequalLengthsError."""
    if group.size() == 1 or (q.device.type != "cpu" and group in _compared):
        return
    own = (q.shape[0], k.shape[0], q.shape[1] if q.dim() == 4 else 1)
    table = torch.empty(group.size() * len(own), dtype=torch.int64, device=q.device)
    dist.all_gather_into_tensor(table, torch.tensor(own, dtype=torch.int64, device=q.device), group=group)
    found = [tuple(each) for each in table.view(-1, len(own)).tolist()]
    if len(set(found)) > 1:
        ranks = dist.get_process_group_ranks(group)
        lengths = ", ".join(
            f"rank {rank} {rows} (batch {batch})" for rank, (rows, _, batch) in zip(ranks, found, strict=True)
        )
        raise UnequalLengthsError(
            f"context parallelism: the ranks hold different numbers of rows of one sequence: {lengths}; give all ranks "
            "of a context-parallel group batches of one length."
        )
    _compared.add(group)
