"""masked_softmax on Ascend NPUs through torch_npu.npu_scaled_masked_softmax, which brings its own backward.

It keeps for the gradient the probabilities alone, which the product with the values keeps anyway. It always takes a
mask, written out over queries and keys; `fixed_triu_mask`, which would make the causal one inside, is documented as not
implemented.

What hidden scores are set to is not documented: -10000 in torch_npu's own tests, minus infinity in a guide. The two
differ for a row in which everything is hidden, which the operator is therefore never handed: it sees every key. Nor
does anything say in which type scores are multiplied by the scale; float16 could overflow, where Megatron scales
because it did, so those that are scaled are not taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

if TYPE_CHECKING:
    from mindspeed_lite.ops.masked_softmax import Case

# Masks that were not given, by device, queries, keys, and whether they are causal: the latest few.
_masks: dict[tuple[torch.device, int, int, bool], torch.Tensor] = {}
_MOST = 4


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: npu_scaled_masked_softmax takes float16, bfloat16 and float32")
    if case.dtype == torch.float16 and case.is_scaled:
        reasons.append("npu_scaled_masked_softmax is not documented to scale float16 without overflow")
    if not case.is_tiled:
        reasons.append("npu_scaled_masked_softmax takes as many queries, and as many keys, as 32, 64, 96, ... or 4096")
    return reasons


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
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
    probs: torch.Tensor = torch_npu.npu_scaled_masked_softmax(scores, hidden, scale=scale, fixed_triu_mask=False)
    return probs


def _own_mask(queries: int, keys: int, causal: bool, device: torch.device) -> torch.Tensor:
    """[1, 1, sq, sk] bool: True above the diagonal if `causal`, nowhere otherwise."""
    made_for = (device, queries, keys, causal)
    mask = _masks.get(made_for)
    if mask is None:
        with torch.inference_mode(False):
            mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device)
            if causal:
                mask = mask.fill_(True).triu_(1)
        if type(mask) is torch.Tensor:  # a fake tensor must not outlive its mode
            if len(_masks) == _MOST:
                del _masks[next(iter(_masks))]
            _masks[made_for] = mask
    return mask
