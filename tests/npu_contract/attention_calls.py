"""What a recorded call of npu_fusion_attention says: its sizes, and which keys it shows to which query.

By the documentation of layouts, masks, modes and tokens; for the contracts, and for what a case wants hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.npu_contract.recorder import Call

LAYOUTS = ("SBH", "BSH", "BSND", "BNSD", "TND")
UNLIMITED = 2147483647

FULL_TOKENS, FULL_MASK, UPPER_LEFT, LOWER_RIGHT, BAND = 0, 1, 2, 3, 4
COMPRESSED = (UPPER_LEFT, LOWER_RIGHT, BAND)


class Sizes(NamedTuple):
    """Of one attention call. In layout TND b is 1 and the lengths are totals."""

    b: int
    sq: int
    sk: int
    n: int
    g: int
    d: int
    dv: int


def sizes_of(call: Call) -> Sizes | str:
    """The sizes of an attention call by its layout and head_num, or why they make no sense."""
    a = call.arguments
    q, k, v, n, layout = (a[name] for name in ("query", "key", "value", "head_num", "input_layout"))
    if layout not in LAYOUTS:
        return f"input_layout is {layout!r}: want one of {', '.join(LAYOUTS)}"
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim != len(layout):
            return f"{name} is {t}: layout {layout} has {len(layout)} dimensions"
    if type(n) is not int or n < 1:
        return f"head_num is {n!r}: want the number of query heads on this rank, a Python int"
    if layout in ("SBH", "BSH"):
        if q.shape[2] % n:
            return f"head_num {n} does not divide the last dimension of query {q}"
        d = q.shape[2] // n
        g, left = divmod(k.shape[2], d)
        if left or not g or v.shape[2] % g:
            return f"key {k} and value {v} do not consist of heads of size {d} (query {q} over {n} heads)"
        dv = v.shape[2] // g
        s, b = (0, 1) if layout == "SBH" else (1, 0)
    else:
        s, b, heads = {"BSND": (1, 0, 2), "BNSD": (2, 0, 1), "TND": (0, None, 1)}[layout]
        if q.shape[heads] != n:
            return f"head_num is {n} and query {q} has {q.shape[heads]} heads"
        if k.shape[heads] != v.shape[heads] or k.shape[-1] != q.shape[-1]:
            return f"query {q}, key {k} and value {v} do not fit each other"
        g, d, dv = k.shape[heads], q.shape[-1], v.shape[-1]
    if b is not None and not q.shape[b] == k.shape[b] == v.shape[b]:
        return f"query {q}, key {k} and value {v} differ in batch (layout {layout})"
    if k.shape[s] != v.shape[s]:
        return f"key {k} and value {v} differ in length (layout {layout})"
    return Sizes(1 if b is None else q.shape[b], q.shape[s], k.shape[s], n, g, d, dv)


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
