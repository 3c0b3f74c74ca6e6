"""Keys visible by position: causal order and sliding window as one band.

Query i is at key i + sk - sq; a band (left, right) shows it keys from `left` before to `right` after. -1: no limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

Window = tuple[int, int]

CAUSAL: Window = (-1, 0)


def canonical(causal: bool, window: Window | None, sq: int, sk: int) -> tuple[bool, Window | None]:
    """Canonical form of a band: without limits that hide no key; causal alone is (True, None).

    Short sequences so lose a window wider than they are, and its mask.
    """
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0
    if left < 0 or left >= sk - 1:
        left = -1
    if right < 0 or right >= sq - 1:
        right = -1
    if (left, right) == (-1, -1):
        return False, None
    if (left, right) == CAUSAL:
        return True, None
    return False, (left, right)


def has_rows_without_keys(causal: bool, window: Window | None, sq: int, sk: int) -> bool:
    """Whether leading queries see no key, for a canonical band."""
    right = 0 if causal else -1 if window is None else window[1]
    return right >= 0 and sq - sk > right


def hidden(sq: int, sk: int, window: Window, device: torch.device) -> Tensor:
    """[sq, sk] bool, True where the band hides the key."""
    left, right = window
    offset = sk - sq
    visible = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if right >= 0:
        visible = visible.tril_(offset + right)
    if left >= 0:
        visible = visible.triu_(offset - left)
    return visible.logical_not_()
