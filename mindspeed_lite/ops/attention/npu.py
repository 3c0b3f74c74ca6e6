"""attention on Ascend NPUs through torch_npu.npu_fusion_attention, which brings its own backward.

Layout "SBH" (heads flattened into the last dimension) is Megatron's own. The operator names what a mask means
by sparse_mode: 1 a full mask, 2 causal from the upper left corner, 3 causal to the lower right corner, 4 a
band measured from the lower right corner; 2 to 4 take one 2048 x 2048 triangle whatever the lengths are.
True hides the key, as in Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

from mindspeed_lite.ops.attention import band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention import Case

_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 1, 2, 3, 4
_UNLIMITED = 2147483647

_triangles: dict[torch.device, torch.Tensor] = {}


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: npu_fusion_attention takes float16, bfloat16 and float32")
    width = max(case.head_size, case.value_size)
    if width > 768:
        reasons.append(f"head size {width}: npu_fusion_attention takes at most 768")
    if case.heads > 256:
        reasons.append(f"{case.heads} heads: npu_fusion_attention takes at most 256")
    if case.empty_rows:
        reasons.append("a causal band with more queries than keys leaves rows without keys")
    return reasons


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
) -> torch.Tensor:
    sq, b, n, d = q.shape
    sk, dv = v.shape[0], v.shape[3]
    width = max(d, dv)
    rest: dict[str, object] = {}
    empty = None
    if mask is not None:
        hidden = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        positions = band.limits(causal, window)
        if positions is not None:
            hidden = hidden | band.hidden(sq, sk, positions, q.device)
        # What the operator returns for a row without keys is not documented: such rows see every key, and
        # are cleared below.
        empty = hidden.all(-1, keepdim=True)
        hidden = hidden & ~empty
        # Documented mask shapes are [b, n, sq, sk], [b, 1, sq, sk], [1, 1, sq, sk] and [sq, sk].
        batches = b if hidden.shape[0] != 1 or hidden.shape[1] != 1 else 1
        rest = {
            "atten_mask": hidden.expand(batches, hidden.shape[1], sq, sk).contiguous(),
            "sparse_mode": _FULL_MASK,
        }
    elif causal:
        rest = {
            "atten_mask": _triangle(q.device),
            "sparse_mode": _UPPER_LEFT if sq == sk else _LOWER_RIGHT,
        }
    elif window is not None:
        left, right = window
        rest = {
            "atten_mask": _triangle(q.device),
            "sparse_mode": _BAND,
            "pre_tockens": left if left >= 0 else _UNLIMITED,
            "next_tockens": right if right >= 0 else _UNLIMITED,
        }
    out: torch.Tensor = torch_npu.npu_fusion_attention(
        *(_flatten(t, width) for t in (q, k, v)),
        head_num=n,
        input_layout="SBH",
        scale=d**-0.5 if scale is None else scale,
        keep_prob=1.0 - dropout_p,
        **rest,
    )[0]
    out = out.view(sq, b, n, width)
    if width != dv:
        out = out[..., :dv]
    if empty is not None:
        out = out.masked_fill(empty.expand(-1, -1, sq, -1).permute(2, 0, 1, 3), 0.0)
    return out.contiguous()


def _flatten(t: torch.Tensor, width: int) -> torch.Tensor:
    """[s, b, heads, size] -> [s, b, heads * width]; zeros behind a head change no score and no value."""
    if t.shape[3] < width:
        t = torch.nn.functional.pad(t, (0, width - t.shape[3]))
    return t.reshape(t.shape[0], t.shape[1], -1).contiguous()


def _triangle(device: torch.device) -> torch.Tensor:
    """[2048, 2048] bool, True above the diagonal: the compressed form of every causal or band mask."""
    triangle = _triangles.get(device)
    if triangle is None:
        with torch.inference_mode(False):
            triangle = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)
        if type(triangle) is torch.Tensor:  # a fake tensor must not outlive its mode
            _triangles[device] = triangle
    return triangle
