"""Cases of attention, compared with Megatron's local DotProductAttention and PyTorch's SDPA.

The reference writes every score: baddbmm, mask, softmax, bmm. Work counts 2 operations per multiply-add of visible
pairs, 2 matmuls forward and 4 backward; bytes are q, k, v, the output and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import attention, packed
from mindspeed_lite.ops.case import Draw, OperatorCases, Peer, Work


@dataclass(frozen=True)
class Shape:
    """q [s, b, n, d], k, v [s, b, g, d]; g: 0 for n; w: visible keys before the query's own, -1 for all.

    mask: random per sequence. sink: one logit per head. packed: three sequences in one pack.
    """

    s: int
    n: int
    d: int
    b: int = 1
    g: int = 0
    w: int = -1
    causal: bool = True
    mask: bool = False
    sink: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        if self.n % self.groups:
            raise ValueError(f"g={self.g} key heads do not divide n={self.n} heads")
        if self.is_special and (self.w >= 0 or not self.causal or self.n != self.groups):
            raise ValueError("mask, sink and packed want causal attention without w and g")

    @property
    def groups(self) -> int:
        return self.g or self.n or 1

    @property
    def is_special(self) -> bool:
        return self.mask or self.sink or self.packed

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.w < 0 else (self.w, 0 if self.causal else self.w)

    @property
    def ends(self) -> tuple[int, ...]:
        return 0, self.s // 3, self.s // 2, self.s

    def make(self, draw: Draw) -> list[Tensor]:
        """q, k, v; with `sink` its logits; the mask of the reference."""
        s, b, n, d = self.s, self.b, self.n, self.d
        batch = () if self.packed else (b,)
        made = [draw(s, *batch, heads, d) for heads in (n, self.groups, self.groups)]
        if self.sink:
            made.append(draw.of(torch.linspace(-2, 2, n)))
        mask = hidden(self)
        if mask is None:
            return made
        if self.mask:
            mask = mask | (torch.rand(b, 1, s, s, **draw.options).cpu() < 0.3)
            mask[..., range(s), range(s)] = False  # no row without keys: the reference differs there
        if self.packed:
            document = torch.arange(s).unsqueeze(-1).ge(torch.tensor(self.ends[1:])).sum(-1)
            mask |= document.unsqueeze(-1) != document
        return [*made, mask.to(draw.device)]

    def ours(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        out: Tensor
        if self.packed:
            out = packed.attention(q, k, v, packed.Packing.of(self.ends), causal=True)
        elif self.mask:
            out = attention(q, k, v, mask=rest[-1])
        elif self.sink:
            out = attention(q, k, v, causal=True, sink=rest[0])
        else:
            out = attention(q, k, v, causal=self.causal, window=self.window)
        return out

    def reference(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        s, b, n, g, d = self.s, self.b, self.n, self.groups, self.d
        if n != g:
            k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
        queries, keys, values = (t.reshape(s, b * n, d).transpose(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(q.new_empty(b * n, s, s), queries, keys.transpose(1, 2), beta=0.0, alpha=d**-0.5)
        if self.causal or self.w >= 0:
            scores.view(b, n, s, s).masked_fill_(rest[-1], -10000.0)
        if self.sink:
            logits = torch.cat([scores, rest[0].repeat(b).reshape(b * n, 1, 1).expand(b * n, s, 1)], -1)
            probs = logits.softmax(-1)[..., :-1]
        else:
            probs = scores.softmax(-1)
        out = torch.bmm(probs, values).view(b, n, s, d).permute(2, 0, 1, 3)  # [s, b, n, d]
        return (out.squeeze(1) if self.packed else out).contiguous()

    def work(self, size: int) -> tuple[Work, Work]:
        tokens = self.s * self.b * self.d * size
        matmul = 2 * self.b * self.n * self.d * visible_pairs(self)
        moved = 2 * tokens * (self.n + self.groups)
        return Work(moved, 2 * matmul), Work(2 * moved, 4 * matmul)


def visible_pairs(shape: Shape) -> int:
    """Visible (query, key) pairs of one head."""
    before = shape.s - 1 if shape.w < 0 else min(shape.w, shape.s - 1)
    # Query i sees min(i, before) keys before its own.
    earlier = before * (before + 1) // 2 + (shape.s - 1 - before) * before
    return shape.s + (earlier if shape.causal else 2 * earlier)


def hidden(shape: Shape) -> Tensor | None:
    """[s, s] bool, True where the key is hidden; None if all are visible."""
    if not shape.causal and shape.w < 0:
        return None
    visible: Tensor = torch.ones(shape.s, shape.s, dtype=torch.bool)
    if shape.w >= 0:
        visible = visible.triu_(-shape.w).tril_(shape.w)
    if shape.causal:
        visible = visible.tril_()
    mask: Tensor = ~visible
    return mask


def sdpa(shape: Shape) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention`, layout conversions included."""
    function = torch.nn.functional.scaled_dot_product_attention

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n or g, s, d]
        mask = ~rest[-1] if shape.w >= 0 else None
        causal = shape.causal and mask is None
        out = function(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shape.n != shape.groups)
        return out.permute(2, 0, 1, 3).contiguous()

    return run


# Small model short and long, grouped heads (Llama 8B), a window (Mistral).
_TIMED = ("s=1024,n=16,d=64", "s=4096,n=16,d=64", "s=2048,n=32,g=8,d=128", "s=4096,n=16,d=64,w=1024")

CASES = OperatorCases(
    "attention",
    Shape,
    correctness=(
        "s=128,n=4,d=64",
        "s=96,b=2,n=4,d=64,mask=1",
        "s=128,n=4,d=64,packed=1",
        "s=96,b=2,n=4,d=64,sink=1",
        "s=100,b=2,n=8,g=2,d=80",
        "s=192,n=4,d=64,w=32",
        "s=130,n=4,g=1,d=128,causal=0",
        "s=130,n=2,d=64,w=20,causal=0",
        # Beyond the NPU's 2048 x 2048 causal triangle.
        "s=2080,n=1,d=64",
    ),
    cpu=_TIMED,
    accelerator=(*_TIMED, "s=8192,n=32,g=8,d=128"),
    peers={"torch sdpa": Peer(sdpa, takes=lambda shape: not shape.is_special)},
)
