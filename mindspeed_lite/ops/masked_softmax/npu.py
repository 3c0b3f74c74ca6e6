"""masked_softmax on Ascend NPUs: torch_npu.npu_scaled_masked_softmax, with its own backward.

It saves only the probabilities. It needs a mask: `fixed_triu_mask` is documented as not implemented.

The value of hidden scores is undocumented (-10000 in torch_npu's tests, -inf in a guide): fully hidden rows, which
differ, are passed as visible. So is the dtype of scaling; float16 could overflow, so scaled scores are refused.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.masked_softmax import Case

# Generated masks by device, queries, keys and causality: the latest few.
_masks: dict[tuple[torch.device, int, int, bool], Tensor] = {}
_MOST = 4


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype == torch.float16 and case.is_scaled:
        reasons.append("npu_scaled_masked_softmax is not documented to scale float16 without overflow")
    if not case.is_tiled:
        reasons.append("npu_scaled_masked_softmax takes as many queries, and as many keys, as 32, 64, 96, ... or 4096")
    return reasons


def masked_softmax(scores: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    queries, keys = scores.shape[2:]
    if mask is None:
        hidden = _own_mask(queries, keys, causal, scores.device)
    else:
        hidden = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        if causal:
            hidden = hidden | _own_mask(queries, keys, causal, scores.device)
        empty = hidden.all(-1, keepdim=True)
        # [b | 1, n | 1, sq, sk]
        hidden = (hidden & ~empty).expand(-1, -1, queries, keys).contiguous()
    probs: Tensor = torch_npu.npu_scaled_masked_softmax(scores, hidden, scale=scale, fixed_triu_mask=False)
    return probs


def _own_mask(queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    """[1, 1, sq, sk] bool: True above the diagonal if `causal`, else all False."""
    made_for = (device, queries, keys, causal)
    mask = _masks.get(made_for)
    if mask is None:
        with torch.inference_mode(False):
            mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device)
            if causal:
                mask = mask.fill_(True).triu_(1)
        if type(mask) is Tensor:  # a fake tensor must not outlive its mode
            if len(_masks) == _MOST:
                del _masks[next(iter(_masks))]
            _masks[made_for] = mask
    return mask
