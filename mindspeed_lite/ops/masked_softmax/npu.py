"""masked_softmax on Ascend NPUs through torch_npu.npu_scaled_masked_softmax, which brings its own backward.

It is softmax(scale * x, hidden entries set to -10000), as the definition has it, and keeps for the gradient the
probabilities alone, which the product with the values keeps anyway. It always takes a mask, written out over queries
and keys; `fixed_triu_mask`, which would make the causal one inside, is documented as not implemented. What it computes
in between for 16-bit scores is CANN's, and not documented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

if TYPE_CHECKING:
    from mindspeed_lite.ops.masked_softmax import Case

# The latest masks of no argument: for each device one, its size, and whether it is causal.
_masks: dict[torch.device, tuple[tuple[int, int, bool], torch.Tensor]] = {}


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: npu_scaled_masked_softmax takes float16, bfloat16 and float32")
    if not case.is_tiled:
        reasons.append("npu_scaled_masked_softmax takes as many queries, and as many keys, as 32, 64, 96, ... or 4096")
    return reasons


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    queries, keys = scores.shape[2:]
    hidden = mask
    if mask is None or causal:
        own = _own_mask(queries, keys, causal, scores.device)
        hidden = own if mask is None else mask | own
    assert hidden is not None
    # [b | 1, n | 1, sq, sk]
    hidden = hidden.reshape((1,) * (4 - hidden.dim()) + tuple(hidden.shape)).expand(-1, -1, queries, keys).contiguous()
    probs: torch.Tensor = torch_npu.npu_scaled_masked_softmax(scores, hidden, scale=scale, fixed_triu_mask=False)
    return probs


def _own_mask(queries: int, keys: int, causal: bool, device: torch.device) -> torch.Tensor:
    """[1, 1, sq, sk] bool: True above the diagonal if `causal`, nowhere otherwise."""
    made_for = (queries, keys, causal)
    latest = _masks.get(device)
    if latest is not None and latest[0] == made_for:
        return latest[1]
    with torch.inference_mode(False):
        mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=device)
        if causal:
            mask = mask.fill_(True).triu_(1)
    if type(mask) is torch.Tensor:  # a fake tensor must not outlive its mode
        _masks[device] = (made_for, mask)
    return mask
