"""attention on Ascend NPUs through torch_npu.npu_fusion_attention and its own backward.

Layout "SBH" is Megatron's, "TND" a pack's. sparse_mode: 1 full mask, 2 causal from the upper left corner, 3 causal to
the lower right, 4 band from the lower right; 2 to 4 take one 2048 x 2048 triangle. True hides the key.

Returns each row's maximum and sum in eight lanes; its backward takes lse as maximum with sum 1. Newer torch_npu takes
an fp32 sink; otherwise it is merged into the result, or with dropout `blocked` serves.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import NamedTuple

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.attention import autograd, blocked
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case

_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 1, 2, 3, 4
_UNLIMITED = 2147483647
_LANES = 8


class _Masking(NamedTuple):
    """Mask arguments of `npu_fusion_attention`: atten_mask, sparse_mode, pre_tockens, next_tockens."""

    mask: Tensor | None = None
    mode: int = 0
    before: int = _UNLIMITED
    after: int = _UNLIMITED


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_triangles: dict[torch.device, Tensor] = {}


def supported(case: Case) -> list[str]:
    reasons = []
    width = max(case.head_size, case.value_size)
    if width > 768:
        reasons.append(f"head size {width}: npu_fusion_attention takes at most 768")
    if case.heads > 256:
        reasons.append(f"{case.heads} heads: npu_fusion_attention takes at most 256")
    return reasons


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.sink is None or _takes_sink():
        return _call(q, k, v, spec)[0]
    if spec.dropout_p > 0.0:
        return blocked.attention(q, k, v, spec)
    return autograd.attention(_KERNELS, q, k, v, spec)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> autograd.Pair:
    with torch.no_grad():
        out, most, total, empty = _call(q, k, v, spec._replace(sink=None))
        lse = most[..., 0] + total[..., 0].log()  # the lanes are equal
        return out, lse if empty is None else lse.masked_fill(empty.squeeze(-1), float("-inf"))


def _call(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output, differentiable in q, k, v and the sink; maxima and sums [b, n, sq, 8]; rows without keys."""
    (sq, b, n, d), dv = q.shape, v.shape[3]
    width = max(d, dv)
    masking, empty = _masking(q, k, spec)
    flat = _flatten(q, width), _flatten(k, width), _flatten(v, width)
    out, most, total = _fused(*flat, n, "SBH", spec, masking)
    out = out.view(sq, b, n, width)
    if width != dv:
        out = out[..., :dv]
    if empty is not None:
        out = out.masked_fill(empty.permute(2, 0, 1, 3), 0.0)
    return out.contiguous(), most, total, empty


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> autograd.Triple:
    n, width = q.shape[2], max(q.shape[3], v.shape[3])
    masking, empty = _masking(q, k, spec)
    if empty is not None:
        # exp(score - maximum) is then 0, without infinities.
        lse = lse.masked_fill(empty.squeeze(-1), torch.finfo(torch.float32).max)
    query, key, value, grad, result = (_flatten(t, width) for t in (q, k, v, dout, out))
    gradients = torch_npu.npu_fusion_attention_grad(
        query,
        key,
        value,
        grad,
        head_num=n,
        input_layout="SBH",
        softmax_max=_lanes(lse),
        softmax_sum=_lanes(torch.ones_like(lse)),
        attention_in=result,
        scale_value=spec.scale,
        keep_prob=1.0,
        atten_mask=masking.mask,
        sparse_mode=masking.mode,
        pre_tockens=masking.before,
        next_tockens=masking.after,
    )
    dq, dk, dv = (
        gradient.view(*t.shape[:3], width)[..., : t.shape[3]]
        for gradient, t in zip(gradients[:3], (q, k, v), strict=True)
    )
    return dq, dk, dv


_KERNELS = autograd.Kernels(forward, backward)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    layout: str,
    spec: AttentionSpec,
    masking: _Masking,
    ends_q: list[int] | None = None,
    ends_k: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, maxima, sums) of tensors in `layout`."""
    sink = {} if spec.sink is None else {"sink": spec.sink.float()}
    out, most, total, *_ = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        head_num=heads,
        input_layout=layout,
        scale=spec.scale,
        keep_prob=1.0 - spec.dropout_p,
        atten_mask=masking.mask,
        sparse_mode=masking.mode,
        pre_tockens=masking.before,
        next_tockens=masking.after,
        actual_seq_qlen=ends_q,
        actual_seq_kvlen=ends_k,
        **sink,
    )
    return out, most, total


@functools.cache
def _takes_sink() -> bool:
    """Whether the operator takes a sink: from torch_npu 2.13 and its contemporary post releases on."""
    operator = torch_npu.npu_fusion_attention
    schema = getattr(getattr(operator, "default", None), "_schema", None)
    names = inspect.signature(operator).parameters if schema is None else [each.name for each in schema.arguments]
    return "sink" in names


def _masking(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[_Masking, Tensor | None]:
    """The operator's mask arguments, and the rows [b | 1, n | 1, sq, 1] without keys.

    The operator's result for a row without keys is undocumented.
    """
    (sq, b, _, _), sk = q.shape, k.shape[0]
    if spec.mask is not None:
        hidden, empty = spec.hidden(sq, sk, q.device)
        # Documented shapes: [b, n, sq, sk], [b, 1, sq, sk], [1, 1, sq, sk] and [sq, sk].
        batches = b if hidden.shape[0] != 1 or hidden.shape[1] != 1 else 1
        written_out = hidden.expand(batches, hidden.shape[1], sq, sk).contiguous()
        return _Masking(written_out, _FULL_MASK), empty
    if spec.causal:
        return _Masking(_triangle(q.device), _UPPER_LEFT if sq == sk else _LOWER_RIGHT), None
    if spec.window is not None:
        left, right = spec.window
        before = left if left >= 0 else _UNLIMITED
        after = right if right >= 0 else _UNLIMITED
        return _Masking(_triangle(q.device), _BAND, before, after), None
    return _Masking(), None


def why_not_packed(case: Case) -> list[str]:
    """Reasons why a pack's sequences run one by one."""
    reasons = []
    if case.window:
        reasons.append("a window in layout TND is not documented")
    if case.sink:
        reasons.append("a sink")
    return reasons


def packed(
    q: Tensor, k: Tensor, v: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], spec: AttentionSpec
) -> Tensor:
    """q [t, n, d], k [u, g, d], v [u, g, dv] with these lengths -> [t, n, dv]."""
    (_, n, d), dv = q.shape, v.shape[2]
    size = max(d, dv)
    out = _fused(
        autograd.pad(q, size).contiguous(),
        autograd.pad(k, size).contiguous(),
        autograd.pad(v, size).contiguous(),
        n,
        "TND",
        spec,
        _Masking(_triangle(q.device), _LOWER_RIGHT) if spec.causal else _Masking(),
        _ends(queries),
        _ends(keys),
    )[0]
    return out[..., :dv].contiguous()


def _ends(lengths: tuple[int, ...]) -> list[int]:
    """Cumulative lengths on the host, without a leading zero."""
    return list(itertools.accumulate(lengths))


def _lanes(t: Tensor) -> Tensor:
    return t.unsqueeze(-1).expand(*t.shape, _LANES).contiguous()


def _flatten(t: Tensor, width: int) -> Tensor:
    """[s, b, heads, size] -> [s, b, heads * width], zero-padded."""
    t = autograd.pad(t, width)
    return t.reshape(t.shape[0], t.shape[1], -1).contiguous()


def _triangle(device: torch.device) -> Tensor:
    """[2048, 2048] bool, True above the diagonal: the compressed causal or band mask."""
    triangle = _triangles.get(device)
    if triangle is None:
        with torch.inference_mode(False):
            triangle = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)
        if type(triangle) is Tensor:  # a fake tensor must not outlive its mode
            _triangles[device] = triangle
    return triangle
