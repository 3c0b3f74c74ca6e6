"""permute on Ascend NPUs: torch_npu's routing-map operators, with their own backward.

They need equal experts per token, or drop_and_pad. They save the map and one int32 per row. Padding takes the first
unrouted tokens, per op-plugin's test. The summation precision is undocumented; torch_npu and CANN disagree on default
determinism.
"""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.permute import Case

OWN_ROW_IDS = True

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OPERATORS = ("npu_moe_token_permute_with_routing_map", "_npu_moe_token_unpermute_with_routing_map")


def supported(case: Case) -> list[str]:
    reasons = []
    if not case.uniform:
        reasons.append(
            "nobody says (topk) that all tokens have equally many experts, which torch_npu's operators want "
            "without drop_and_pad"
        )
    if case.probs_dtype not in (None, *DTYPES):
        reasons.append(f"probs in {case.probs_dtype}: torch_npu's operators take float16, bfloat16 and float32")
    if case.large:
        reasons.append("2^24 - 1 tokens, experts or rows or more, or 512 experts for a token")
    reasons += [f"this torch_npu has no {name}" for name in _OPERATORS if not hasattr(torch_npu, name)]
    return reasons


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int, capacity: int | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    x, weights = _matched(tokens, probs)
    permuted, permuted_probs, row_ids = torch_npu.npu_moe_token_permute_with_routing_map(
        x, routing_map, probs=weights, num_out_tokens=count, drop_and_pad=capacity is not None
    )
    return permuted.to(tokens.dtype), None if probs is None else permuted_probs.to(probs.dtype), row_ids


def unpermute(
    permuted: Tensor, row_ids: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None, drop_and_pad: bool
) -> Tensor:
    x, weights = _matched(permuted, probs)
    # The public operator returns only the first result of this one.
    out: Tensor = torch_npu._npu_moe_token_unpermute_with_routing_map(
        x,
        row_ids,
        [tokens, permuted.shape[1]],
        probs=weights,
        routing_map=None if probs is None else routing_map,
        drop_and_pad=drop_and_pad,
    )[0]
    return out.to(permuted.dtype)


def _matched(x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Casts both to one dtype, or keeps bfloat16 with float32 probs, as the operators need."""
    if probs is None or probs.dtype == x.dtype or (x.dtype, probs.dtype) == (torch.bfloat16, torch.float32):
        return x, probs
    return x.float(), probs.float()
