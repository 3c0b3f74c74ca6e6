"""The calls of our operators that are proven on the real wheel, by table.

A case knows which operator of `mindspeed_lite.ops` it calls, how, and what torch_npu must be handed for it. That is
said here from the public operator's documentation, independently of its implementation. To add an operator: write
a class like those below, and enter its cases in ALL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tests.npu_contract.recorder import TRIANGLE, Call, Tensor
from tests.npu_contract.visibility import visible_to

Tensors = Mapping[str, torch.Tensor]


class Case(Protocol):
    """One call of an operator."""

    @property
    def name(self) -> str: ...

    @property
    def operator(self) -> str:
        """Its name in mindspeed_lite.ops."""

    @property
    def forward(self) -> str:
        """The operator of torch_npu that it must become, and `backward` that of its gradient."""

    @property
    def backward(self) -> str: ...

    @property
    def kernel(self) -> str:
        """The CANN kernel behind `forward`."""

    def leaves(self, device: str) -> Tensors:
        """Its inputs that require a gradient."""

    def run(self, leaves: Tensors) -> torch.Tensor: ...

    def why_not(self, leaves: Tensors) -> list[str]: ...

    def arguments(self) -> Mapping[str, Any]:
        """What the forward call must be handed, as far as it is known whatever the device. Floats are compared
        approximately, tensors by dtype and shape."""

    def result(self) -> Tensor:
        """The output's shape and dtype, and whether it must be contiguous."""

    def effect(self, call: Call) -> list[str]:
        """What is wrong with a forward call whose masks are known."""


@dataclass(frozen=True)
class Attention:
    """`mindspeed_lite.ops.attention.attention`; mask: the leading sizes of one over [sq, sk], or all its sizes."""

    name: str
    sq: int = 24
    sk: int = 24
    b: int = 2
    n: int = 4
    g: int = 4
    d: int = 64
    dv: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: tuple[int, ...] | None = None
    scale: float | None = None
    dropout: float = 0.0
    packed: bool = False

    operator = "attention"
    forward = "npu_fusion_attention"
    backward = "npu_fusion_attention_grad"
    kernel = "aclnnFlashAttentionScore"

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        if self.packed:
            width = (self.n + self.g) * self.d + self.g * self.dv
            return {"qkv": torch.zeros(self.sq, self.b, width, dtype=dtype, device=device).requires_grad_()}
        shapes = {
            "q": (self.sq, self.b, self.n, self.d),
            "k": (self.sk, self.b, self.g, self.d),
            "v": (self.sk, self.b, self.g, self.dv),
        }
        return {name: torch.zeros(shape, dtype=dtype, device=device).requires_grad_() for name, shape in shapes.items()}

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.attention import attention

        return attention(*self._inputs(leaves), **self._options(leaves))

    def why_not(self, leaves: Tensors) -> list[str]:
        from mindspeed_lite.ops.attention import why_not

        return why_not(*self._inputs(leaves), **self._options(leaves))

    def hidden(self) -> torch.Tensor | None:
        """The caller's mask, on the CPU: most keys visible, one query row without any."""
        if self.mask is None:
            return None
        count = math.prod(self.mask)
        mask = (torch.arange(count) * 7 % 5 < 2).view(self.mask)
        if self.mask[-2] > 1:
            mask[..., 5, :] = True
        return mask

    def arguments(self) -> Mapping[str, Any]:
        width = max(self.d, self.dv)
        keys = Tensor(self.dtype, (self.sk, self.b, self.g * width), "")
        given: dict[str, Any] = {
            "query": Tensor(self.dtype, (self.sq, self.b, self.n * width), ""),
            "key": keys,
            "value": keys,
            "head_num": self.n,
            "input_layout": "SBH",
            "scale": self.d**-0.5 if self.scale is None else self.scale,
            "keep_prob": 1.0 - self.dropout,
        }
        unused = ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink", "dropout_mask")
        return given | dict.fromkeys(unused)

    def result(self) -> Tensor:
        return Tensor(self.dtype, (self.sq, self.b, self.n, self.dv), "")

    def effect(self, call: Call) -> list[str]:
        seen = visible_to(call)
        if seen is None:
            return ["which keys are hidden is not known: the mask was recorded without its content"]
        found = []
        wanted = self.visible()
        if seen.shape[2:] != wanted.shape[2:] or not torch.equal(*torch.broadcast_tensors(seen, wanted)):
            found.append("the mask, sparse_mode and tokens hide other keys than the caller asked for")
        if not seen.any(-1).all():
            found.append("a row without visible keys is handed over: what becomes of it is not documented")
        mask = call.arguments["atten_mask"]
        if self.mask is None and mask is not None and mask.shape != TRIANGLE:
            found.append("a mask as large as the scores, where the compressed one would do")
        return found

    def visible(self) -> torch.Tensor:
        """[b, n, sq, sk]: the keys each query may see; all of them where there would be none, which is cleared."""
        query = torch.arange(self.sq)[:, None] + self.sk - self.sq
        key = torch.arange(self.sk)[None, :]
        seen = torch.ones(self.sq, self.sk, dtype=torch.bool)
        if self.causal:
            seen &= key <= query
        left, right = self.window or (-1, -1)
        if left >= 0:
            seen &= key >= query - left
        if right >= 0:
            seen &= key <= query + right
        seen = seen.expand(self.b, self.n, self.sq, self.sk)
        hidden = self.hidden()
        if hidden is not None:
            seen = seen & ~hidden
        return seen | ~seen.any(-1, keepdim=True)

    def _inputs(self, leaves: Tensors) -> tuple[torch.Tensor, ...]:
        if not self.packed:
            return leaves["q"], leaves["k"], leaves["v"]
        sizes = [self.n * self.d, self.g * self.d, self.g * self.dv]
        q, k, v = leaves["qkv"].split(sizes, dim=2)
        return q.unflatten(2, (self.n, self.d)), k.unflatten(2, (self.g, self.d)), v.unflatten(2, (self.g, self.dv))

    def _options(self, leaves: Tensors) -> dict[str, Any]:
        hidden = self.hidden()
        if hidden is not None:
            hidden = hidden.to(next(iter(leaves.values())).device)
        return {
            "causal": self.causal,
            "window": self.window,
            "mask": hidden,
            "scale": self.scale,
            "dropout_p": self.dropout,
        }


@dataclass(frozen=True)
class RmsNorm:
    """`mindspeed_lite.ops.rms_norm.rms_norm`; eps is never torch_npu's own default."""

    name: str
    shape: tuple[int, ...] = (6, 2, 64)
    dtype: str = "bfloat16"
    eps: float = 1e-5
    zero_centered: bool = False
    transposed: bool = False

    operator = "rms_norm"
    forward = "npu_rms_norm"
    backward = "npu_rms_norm_backward"
    kernel = "aclnnRmsNorm"

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        return {
            "x": torch.zeros(self.shape, dtype=dtype, device=device).requires_grad_(),
            "weight": torch.zeros(self.shape[-1], dtype=dtype, device=device).requires_grad_(),
        }

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.rms_norm import rms_norm

        return rms_norm(self._x(leaves), leaves["weight"], self.eps, self.zero_centered)

    def why_not(self, leaves: Tensors) -> list[str]:
        from mindspeed_lite.ops.rms_norm import why_not

        return why_not(self._x(leaves), leaves["weight"], self.eps, self.zero_centered)

    def arguments(self) -> Mapping[str, Any]:
        shape = self.result().shape
        if not 2 <= len(shape) <= 8:
            shape = (math.prod(shape[:-1]), shape[-1])
        return {
            "input": Tensor(self.dtype, shape, ""),
            "gamma": Tensor(self.dtype, self.shape[-1:], ""),
            "epsilon": self.eps,
        }

    def result(self) -> Tensor:
        shape = self.shape
        if self.transposed:
            shape = (shape[1], shape[0], *shape[2:])
        return Tensor(self.dtype, shape, "", contiguous=False)

    def effect(self, call: Call) -> list[str]:
        return []

    def _x(self, leaves: Tensors) -> torch.Tensor:
        return leaves["x"].transpose(0, 1) if self.transposed else leaves["x"]


_ATTENTION = (
    Attention("plain"),
    Attention("causal", causal=True),
    Attention("causal, more keys than queries", causal=True, sk=40),
    Attention("causal, one query", causal=True, sq=1),
    Attention("more keys than queries", sk=40),
    Attention("more queries than keys", sk=16),
    Attention("window", window=(5, 0)),
    Attention("window, more keys than queries", window=(5, 0), sk=40),
    Attention("two-sided window", window=(3, 6)),
    Attention("two-sided window, more keys than queries", window=(3, 6), sk=40),
    Attention("window open to the left", window=(-1, 2)),
    Attention("window open to the right", window=(2, -1)),
    Attention("causal and window", causal=True, window=(4, 9)),
    Attention("mask per batch", mask=(2, 1, 24, 24)),
    Attention("mask for all", mask=(1, 1, 24, 24)),
    Attention("mask per head", mask=(1, 4, 24, 24)),
    Attention("mask per batch and head", mask=(2, 4, 24, 24)),
    Attention("mask without batch and heads", mask=(24, 24)),
    Attention("mask of keys", mask=(2, 1, 1, 24)),
    Attention("mask, more keys than queries", mask=(2, 1, 24, 40), sk=40),
    Attention("mask and causal", mask=(2, 1, 24, 24), causal=True),
    Attention("mask of keys and causal", mask=(2, 1, 1, 24), causal=True),
    Attention("mask and window", mask=(2, 4, 24, 24), window=(3, 1)),
    Attention("groups", g=2, causal=True),
    Attention("one key head", g=1, causal=True),
    Attention("groups and mask", g=2, mask=(2, 1, 24, 24)),
    Attention("one head on this rank", n=1, g=1, causal=True),
    Attention("scale", scale=0.3, causal=True),
    Attention("smaller values", dv=32, causal=True),
    Attention("larger values", dv=128, causal=True),
    Attention("larger values and groups", dv=128, g=2),
    Attention("heads of 192 and values of 128", d=192, dv=128, causal=True),
    Attention("heads of 80", d=80, dv=80),
    Attention("dropout", dropout=0.1, causal=True),
    Attention("dropout and mask", dropout=0.25, mask=(1, 1, 24, 24)),
    Attention("float16", dtype="float16", causal=True),
    Attention("float32", dtype="float32", causal=True),
    Attention("packed", packed=True, causal=True),
    Attention("packed groups", packed=True, g=2),
    Attention("longer than the triangle", sq=2304, sk=2304, b=1, n=1, g=1, d=16, dv=16, causal=True),
)

_RMS_NORM = (
    *(RmsNorm(f"{len(shape)} dimensions", shape=shape) for shape in (
        (64,), (5, 64), (6, 2, 64), (3, 2, 2, 64), (2, 2, 2, 2, 64), (1, 2, 1, 2, 1, 64), (1, 2, 1, 2, 1, 2, 64),
        (1, 2, 1, 2, 1, 2, 1, 64), (1, 2, 1, 2, 1, 2, 1, 2, 64),
    )),
    *(RmsNorm(f"rms_norm {dtype}", dtype=dtype) for dtype in ("float16", "float32")),
    *(RmsNorm(f"zero-centered {dtype}", dtype=dtype, zero_centered=True) for dtype in ("bfloat16", "float32")),
    RmsNorm("epsilon", eps=1e-3),
    RmsNorm("transposed", transposed=True),
    RmsNorm("zero-centered, one dimension", shape=(64,), zero_centered=True),
)  # fmt: skip

ALL: tuple[Case, ...] = (*_ATTENTION, *_RMS_NORM)
CASES: Mapping[str, Case] = {case.name: case for case in ALL}
