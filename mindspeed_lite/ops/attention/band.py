"""Keys visible by position: causal order and sliding window as one band.

Query i is at key i + sk - sq; a band (left, right) shows it keys from `left` before to `right` after. -1: no limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

Window = tuple[int, int]

CAUSAL: Window = (-1, 0)

# Bounds the cached band masks when lengths vary; training uses one or two.
_KEPT = 8
_masks: dict[tuple[int, int, Window, torch.device, torch.dtype], Tensor] = {}


def canonical(causal: bool, window: Window | None, sq: int, sk: int) -> tuple[bool, Window | None]:
    """Canonical band: limits that hide nothing dropped, causal alone as (True, None).

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


def additive(sq: int, sk: int, window: Window, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[sq, sk] in `dtype`, -inf where the band hides the key and 0 elsewhere; cached, read-only.

    PyTorch would convert a bool mask at every call, and every layer would save its own copy.
    """
    if torch.compiler.is_compiling():
        return _build_additive(sq, sk, window, device, dtype)
    key = (sq, sk, window, device, dtype)
    mask = _masks.get(key)
    if mask is None:
        # Inference tensors cannot be saved for backward.
        with torch.inference_mode(False):
            mask = _build_additive(sq, sk, window, device, dtype)
        if type(mask) is Tensor:  # a fake tensor must not outlive its mode
            while len(_masks) >= _KEPT:
                _masks.pop(next(iter(_masks)), None)
            _masks[key] = mask
    return mask


def _build_additive(sq: int, sk: int, window: Window, device: torch.device, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(sq, sk, dtype=dtype, device=device)
    return mask.masked_fill_(hidden(sq, sk, window, device), float("-inf"))
