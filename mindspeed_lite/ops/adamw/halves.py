"""An fp32 number in two halves: a bf16 number, rounded to nearest even, and 16 bits beside it.

The high half is what a model computes with, so beside it an optimizer need keep only the low one: 4 bytes for both
instead of 6. With the bits x of the number, y = x + 0x8000 has in its upper 16 bits the bf16 number that is nearest,
ties away from zero, and in its lower ones what is kept. Two kinds of numbers take 1 from the upper half: ties that
thereby become even, and NaNs near the last pattern, whose y has run over into the sign. That they did is one bit more
than 32; it stands in the sign of the second moment, which is never negative, zero included.

Exact for all 2^32 patterns, and the high half is PyTorch's conversion for every number; of the NaNs, which keep their
payload, those with nothing in its upper 7 bits may read as infinity. Arithmetic makes no such NaN.
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
