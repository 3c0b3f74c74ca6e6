"""Which keys an attention call shows to which query, by the documentation of its mask, mode and tokens."""

from __future__ import annotations

import torch

from tests.npu_contract.contracts import (
    BAND,
    COMPRESSED,
    FULL_MASK,
    FULL_TOKENS,
    LOWER_RIGHT,
    UPPER_LEFT,
    sizes_of,
)
from tests.npu_contract.recorder import Call


def visible_to(call: Call) -> torch.Tensor | None:
    """[b or 1, n or 1, sq, sk] bool of a recorded npu_fusion_attention; None if its mask's content is unknown.

    Query i stands at key i in modes 0 to 2, and at key i + sk - sq in modes 3 and 4. A mask that is not the
    triangle where the mode takes it counts as unknown.
    """
    a = call.arguments
    mask, mode = a["atten_mask"], a["sparse_mode"]
    sizes = sizes_of(call)
    if isinstance(sizes, str):
        return None
    query, key = torch.arange(sizes.sq)[:, None], torch.arange(sizes.sk)[None, :]
    everything = torch.ones(1, 1, sizes.sq, sizes.sk, dtype=torch.bool)
    if mask is None:
        return everything
    if mask.content is None or (mode in COMPRESSED and mask.content != "triangle"):
        return None
    if mode == UPPER_LEFT:
        return everything & (key <= query)
    corner = query + sizes.sk - sizes.sq
    if mode == LOWER_RIGHT:
        return everything & (key <= corner)
    if mode == BAND:
        return everything & (key >= corner - a["pre_tockens"]) & (key <= corner + a["next_tockens"])
    if mode not in (FULL_TOKENS, FULL_MASK) or isinstance(mask.content, str):
        return None
    hidden = torch.tensor(mask.content, dtype=torch.bool)
    seen = ~hidden.reshape((1,) * (4 - hidden.dim()) + tuple(hidden.shape))
    if mode == FULL_TOKENS:
        seen = seen & (key >= query - a["pre_tockens"]) & (key <= query + a["next_tockens"])
    return seen
