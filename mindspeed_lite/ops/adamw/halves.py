"""Codec of fp32 as bf16, rounded to nearest even, plus 16 low bits and one more.

Optimizers store only the low half next to the model's bf16: 4 bytes instead of 6. With x as bits, y = x + 0x8000 has
the nearest bf16, ties away from zero, in its upper and the stored bits in its lower half. Ties that so become even,
and NaNs whose y overflows into the sign, subtract 1 from the upper half. This extra bit is the second moment's sign.

Exact for all 2^32 patterns; NaNs with an empty upper payload may read as infinity in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 0x8000


def split(word: Tensor, high: Tensor, low: Tensor, exp_avg_sq: Tensor | None) -> None:
    """Writes the halves of `word` (fp32) into `high` (bf16), `low` (int16) and the sign of `exp_avg_sq`.

    All contiguous, of one size. Without a second moment a tie rounded towards zero changes by 2^-24 of its size.
    """
    bits = word.view(torch.int32).view(-1)
    away = bits + _HALF
    both = away.view(torch.int16).view(-1, 2)
    below, above = both[:, 0], both[:, 1]
    bit = ((below == 0) & ((above & 1) == 1)) | ((away ^ bits) < 0)
    if exp_avg_sq is None:
        below = torch.where(bit, -1, below)
    else:
        size = exp_avg_sq.view(-1).abs()
        exp_avg_sq.view(-1).copy_(torch.where(bit, -size, size))
    high.view(torch.int16).view(-1).copy_(above - bit.to(torch.int16))
    low.view(-1).copy_(below)


def join(high: Tensor, low: Tensor, exp_avg_sq: Tensor | None) -> Tensor:
    """The fp32 values of these halves, in the shape of `high`."""
    above = high.view(torch.int16).view(-1)
    if exp_avg_sq is not None:
        above = above + torch.signbit(exp_avg_sq.view(-1)).to(torch.int16)
    away = torch.stack((low.view(-1), above), dim=1).view(torch.int32)
    return (away - _HALF).view(torch.float32).view(high.shape)
