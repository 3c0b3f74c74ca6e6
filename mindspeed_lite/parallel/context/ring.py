"""Ring attention: keys and values travel from rank to rank behind the products, and their gradients travel home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.attention.autograd import sink_gradient, with_sink
from mindspeed_lite.parallel.context import schedule
from mindspeed_lite.parallel.context.messages import Mail, Pair
from mindspeed_lite.parallel.context.partial import Partial, RankBlocks, Sums, zero_sum
from mindspeed_lite.parallel.context.pieces import needs

Cache = Literal["none", "half", "full"]


@dataclass(frozen=True)
class Ring:
    """How a ring communicates.

    group: its ranks, in the order of the sequence.
    second: another group of the same ranks, on which sums and a double ring's outer hops do not wait for inner hops.
    window: ranks of an inner ring; 1 is a single ring.
    cache: what of the received keys and values is kept for the backward pass: nothing, the keys, or both.
    """

    group: dist.ProcessGroup
    second: dist.ProcessGroup | None = None
    window: int = 1
    cache: Cache = "none"

    @property
    def lanes(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups of both lanes."""
        return self.group, self.group if self.second is None else self.second


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, blocks: RankBlocks, ring: Ring
) -> torch.Tensor:
    """Attention over the whole sequence of a ring; `blocks.layout` has one share for each of its ranks.

    q: [s, b, n, d], k: [s, b, g, d], v: [s, b, g, dv], or [t, heads, size] of a pack: this rank's rows. Returns
    [s, b, n, dv] or [t, n, dv] in q's dtype. sink: [n], or None.
    """
    out: torch.Tensor = _Ring.apply(q, k, v, sink, blocks, ring)  # type: ignore[no-untyped-call]
    return out


def finish(partial: Partial, sink: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in `dtype`, lse) of all keys and the sink."""
    out, lse = partial.out, partial.lse
    if sink is not None:
        out, lse = with_sink(out, lse, sink)
    return out.to(dtype), lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        blocks: RankBlocks,
        ring: Ring,
    ) -> torch.Tensor:
        rank, pair = blocks.rank, Pair.of(k, v)
        own = pair.message(k, v)
        mail = Mail(ring.lanes, {"kv": own})
        held = {("kv", rank): own}
        partial = Partial.of(q if q.dim() == 4 else q.unsqueeze(1), v)
        kept: dict[int, torch.Tensor] = {}
        for step in _program(blocks, ring).forward:
            message = _arrive(mail, held, step)
            if step.computes:
                blocks.forward(q, *pair.of_message(message), step.owner, partial)
                if step.owner != rank and ring.cache != "none":
                    kept[step.owner] = message if ring.cache == "full" else pair.of_message(message)[0].clone()
            if step.owner != rank:
                held.pop(("kv", step.owner), None)
        mail.finish()
        out, lse = finish(partial, sink, q.dtype)
        if blocks.is_pack:
            out, lse = out.squeeze(1), lse.squeeze(0)
        ctx.save_for_backward(q, k, v, sink, out, lse, *kept.values())
        ctx.kept, ctx.blocks, ctx.ring = tuple(kept), blocks, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks, ring = ctx.blocks, ctx.ring
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        rank, pair = blocks.rank, Pair.of(k, v)
        caches = dict(zip(ctx.kept, kept, strict=True))
        # With the keys kept, values alone travel.
        own = v.reshape(-1) if ring.cache == "half" else pair.message(k, v)
        dq, home = zero_sum(q), pair.zero_sums(k)
        mail = Mail(ring.lanes, {"kv": own, "sum": home})
        held = {("kv", rank): own}
        if ring.cache == "full":
            held |= {("kv", owner): message for owner, message in caches.items()}
        program = _program(blocks, ring)
        for step in program.backward:
            message = _arrive(mail, held, step)
            if step.computes:
                if ring.cache == "half":
                    keys, values = k if step.owner == rank else caches[step.owner], message.view(v.shape)
                else:
                    keys, values = pair.of_message(message)
                block = home if step.owner == rank else pair.zero_sums(k)
                blocks.backward(dout, q, keys, values, out, lse, step.owner, Sums(dq, *pair.of_message(block)))
                if step.owner != rank:
                    held["sum", step.owner] = block.add_(mail.take("sum", step.owner)) if step.receives_sum else block
            if step.owner != rank:
                held.pop(("kv", step.owner), None)
        mail.post(program.last, held)
        if mail.expects("sum", rank):
            home += mail.take("sum", rank)
        mail.finish()
        dk, dv = pair.of_message(home)
        dsink = None
        if ctx.needs_input_grad[3]:
            rows = (dout, out, lse) if not blocks.is_pack else (dout.unsqueeze(1), out.unsqueeze(1), lse.unsqueeze(0))
            dsink = sink_gradient(*rows, sink)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


def _arrive(mail: Mail, held: dict[tuple[str, int], torch.Tensor], step: schedule.RingStep) -> torch.Tensor:
    """The keys and values of a step, once they have come; its messages are on their way then."""
    if mail.expects("kv", step.owner):
        held["kv", step.owner] = mail.take("kv", step.owner)
    mail.post(step.moves, held)
    for move in step.moves:
        if move.what == "sum" and move.direction == "send":
            del held["sum", move.owner]
    return held.get(("kv", step.owner))  # type: ignore[return-value]  # of a block that no query sees: None


def _program(blocks: RankBlocks, ring: Ring) -> schedule.Program:
    layout = blocks.layout
    ranks = range(layout.ranks)
    needed = tuple(tuple(needs(layout, reader, owner, blocks.band) for owner in ranks) for reader in ranks)
    return schedule.ring(layout.ranks, ring.window, ring.cache != "full", needed)[blocks.rank]
