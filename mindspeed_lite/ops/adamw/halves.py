"""An fp32 number in two halves: a bf16 number, rounded to nearest even, and 16 more bits.

The model computes with the high half, so an optimizer keeps only the low one: 4 bytes for both instead of 6. With the
bits x, y = x + 0x8000 has in its upper 16 bits the nearest bf16 number, ties away from zero, and in its lower ones what
is kept. Ties that thereby become even, and NaNs whose y has overflowed into the sign, take 1 from the upper half. That
is one bit more than 32; it is stored in the sign of the second moment.

Exact for all 2^32 patterns; the high half is PyTorch's conversion for every number, except that NaNs with an empty
upper payload may read as infinity.
"""

from __future__ import annotations

import torch

_HALF = 0x8000


def split(word: torch.Tensor, high: torch.Tensor, low: torch.Tensor, exp_avg_sq: torch.Tensor | None) -> None:
    """Write the halves of `word` (fp32, contiguous) into `high` (bf16), `low` (int16) and the sign of `exp_avg_sq`.

    All of one size, `high`, `low` and `exp_avg_sq` contiguous. Without a second moment there is no place for the bit:
    a tie that is rounded towards zero then becomes the next number on that side, 2^-24 of its size away.
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


def join(high: torch.Tensor, low: torch.Tensor, exp_avg_sq: torch.Tensor | None) -> torch.Tensor:
    """The fp32 numbers, in the shape of `high`, whose halves these are; nothing is written."""
    above = high.view(torch.int16).view(-1)
    if exp_avg_sq is not None:
        above = above + torch.signbit(exp_avg_sq.view(-1)).to(torch.int16)
    away = torch.stack((low.view(-1), above), dim=1).view(torch.int32)
    return (away - _HALF).view(torch.float32).view(high.shape)
