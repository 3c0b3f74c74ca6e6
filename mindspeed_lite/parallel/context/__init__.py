"""Attention over a sequence that is split over the ranks of a group: ring, Ulysses, both, or gathered keys.

layout, pieces    who holds which rows, and which products a mask by position leaves of two ranks' block
schedule          a ring or double ring as a list of steps for each rank
partial           one rank's queries against one owner's keys after another, summed in fp32
ring, messages    the steps executed over process groups
ulysses, rows     all-to-alls between rows and heads
gathered_keys     keys and values gathered by one collective
lengths           one error for sequences of different lengths
cost              predicted exposed communication, from bytes and products
simulation        the time of a ring's steps from those of its blocks and messages

`attend` puts them together. Every algorithm takes and returns the same rows of each rank, those of `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_lite.ops import attention as op
from mindspeed_lite.ops.attention import band as bands
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.parallel.context import gathered_keys, ring, ulysses
from mindspeed_lite.parallel.context.layout import Layout, gathered, packed_zigzag, stream_rows, zigzag
from mindspeed_lite.parallel.context.lengths import compare_lengths
from mindspeed_lite.parallel.context.partial import Dropout, RankBlocks
from mindspeed_lite.parallel.context.pieces import Band
from mindspeed_lite.parallel.context.ring import Ring

__all__ = ["Algorithm", "Layout", "Ring", "attend", "attend_masked", "packed_zigzag", "zigzag"]


@dataclass(frozen=True)
class Algorithm:
    """How the ranks of a layout share one attention; at least one of the three groups is given.

    ulysses: adjacent ranks, who share heads. Alone: all ranks.
    ring: ranks who share the sequence; with `ulysses` those of the same place in their Ulysses groups.
    gathered: as `ring`, but keys and values are gathered.
    gather_keys: Ulysses gathers all key heads instead of sending each rank its own.
    """

    ulysses: dist.ProcessGroup | None = None
    ring: Ring | None = None
    gathered: dist.ProcessGroup | None = None
    gather_keys: bool = False

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those that it has, which together join all ranks."""
        given = (self.ulysses, self.ring.group if self.ring else None, self.gathered)
        return tuple(group for group in given if group is not None)

    @property
    def ranks(self) -> int:
        """Over how many ranks the sequence is split."""
        outer = self.ring.group if self.ring else self.gathered
        return (outer.size() if outer else 1) * (self.ulysses.size() if self.ulysses else 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    algorithm: Algorithm,
    *,
    band: Band = (-1, -1),
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of the whole sequence, for this rank's rows of it; differentiable in q, k, v and the sink.

    q: [s, b, n, d], k: [s, b, g, d], v: [s, b, g, dv] with the s rows of this rank in `layout`, or of a pack [t, n, d],
    [t, g, d] and [t, g, dv]. Returns [s, b, n, dv] or [t, n, dv] in q's dtype; padding rows of a pack are 0.

    band: (left, right), the keys before and after its own position that a query sees; -1 is no limit, (-1, 0) causal.
    scale: 1 / sqrt(d) unless given.
    dropout_p: drawn by position in the whole sequence from a seed of the device's default generator, so that every
        algorithm and number of ranks drops the same, given the same seed on all ranks.
    sink: [n], one logit per head that takes weight and gives no value.

    Raises:
        ValueError: the rows are not those of the layout, its ranks not those of the algorithm, or heads are fewer than
            the ranks of Ulysses.
        lengths.UnequalLengthsError: the ranks have sequences of different lengths.
    """
    if algorithm.ranks != layout.ranks:
        raise ValueError(f"context parallelism: a layout of {layout.ranks} ranks over groups of {algorithm.ranks}")
    if not q.shape[0] == k.shape[0] == v.shape[0] == layout.rows(0):
        raise ValueError(
            f"context parallelism: {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values on a rank that has "
            f"{layout.rows(0)} rows; all ranks must have batches of one length"
        )
    for group in algorithm.groups:
        compare_lengths(q, k, group)
    is_pack, heads, first_head = q.dim() == 3, q.shape[-2], 0
    # One seed, before the heads are split: all ranks draw the same.
    seed = torch.randint(1 << 62, (), device=q.device) if dropout_p > 0.0 else None
    exchange, order, split = algorithm.ulysses, None, None
    if exchange is not None:
        split = ulysses.split_heads(heads, k.shape[-2], exchange.size())
        whole = gathered(layout, exchange.size())
        layout, order = whole.layout, whole.order[_outer_rank(algorithm)]
        q, k, v = ulysses.to_heads(q, k, v, exchange, order, gather_keys=algorithm.gather_keys)
        first_head, end = split.q[exchange.rank()]
        sink = None if sink is None else sink[first_head:end]
    if layout.ranks == 1 and seed is None:
        out = _alone(q, k, v, layout, band, scale, sink)
    else:
        dropout = None if seed is None else Dropout(dropout_p, seed, first_head, heads)
        blocks = RankBlocks(layout, _outer_rank(algorithm), band, scale, is_pack, dropout)
        if algorithm.gathered is not None:
            out = gathered_keys.attend(q, k, v, sink, blocks, algorithm.gathered)
        else:
            own = algorithm.ring
            if own is None:
                assert exchange is not None
                own = Ring(exchange)  # of one rank: sends nothing
            out = ring.attend(q, k, v, sink, blocks, own)
    if exchange is None:
        return out
    assert order is not None and split is not None
    return ulysses.to_rows(out, exchange, order, split.q)


def attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    group: dist.ProcessGroup,
    mask: torch.Tensor,
    *,
    window: Band | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend`, under any mask: keys and values are gathered, and the mask is that of this rank's queries.

    mask: bool, True hides the key, [b or 1, n or 1, s or 1, keys of the whole sequence], its queries in the order of
        this rank's rows and its keys in that of the sequence.
    window: hides keys besides.

    Raises:
        ValueError: the mask does not fit.
    """
    compare_lengths(q, k, group)
    keys, values = gathered_keys.gather_keys(k, v, layout, group)
    if window is not None:
        length = keys.shape[0]
        rows = torch.tensor(stream_rows(layout, group.rank()), device=mask.device)
        mask = mask | bands.hidden(length, length, window, mask.device).index_select(0, rows)
    spec = op.prepare(q, keys, values, mask=mask, scale=scale, dropout_p=dropout_p, sink=sink)
    return op.attend(q, keys, values, spec)[0]


def _outer_rank(algorithm: Algorithm) -> int:
    group = algorithm.ring.group if algorithm.ring else algorithm.gathered
    return 0 if group is None else group.rank()


def _alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    band: Band,
    scale: float | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """The whole sequence on one rank: the operator itself."""
    if q.dim() == 4:
        return op.attend(q, k, v, op.prepare(q, k, v, window=band, scale=scale, sink=sink))[0]
    packing = packed.Packing(layout.documents, layout.documents)
    return packed.attend(q, k, v, packing, packed.prepare(q, k, v, packing, window=band, scale=scale, sink=sink))[0]
