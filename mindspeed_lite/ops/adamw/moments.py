"""bf16 and fp8 storage of Adam's moments, stochastically rounded.

bf16    the upper half of fp32.
fp8     a byte per value and, per `BLOCK` values, the rounded-up exponent of the largest. First moments have a sign,
        4 exponent and 3 mantissa bits, second moments 5 and 2. Code 0 is zero. First moments below about 2^-15 of the
        block's largest become zero; second moments never do, as the step divides by them.

Rounding to nearest would lose steps smaller than the distance of two codes. The random bits hash both new moments and
the step count: the same on every rank, run and device (integer arithmetic). The sign of a second moment is kept (see
`halves`).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128

_MASK = 0x7FFFFFFF
_NAN = 0x7FC00000
# (fp32 bits cut off, exponents below the block's largest that have codes).
_FIRST, _SECOND = (20, 15), (21, 31)
_BF16 = 16


def seed(step: float) -> int:
    """The step count's contribution to the hash, signed 32 bit."""
    return _signed(int(step) * 0x9E3779B1)


def exponents(size: int, device: torch.device | str | None = None) -> Tensor:
    """Zero exponents for `size` values in fp8."""
    return torch.zeros(-(-size // BLOCK), dtype=torch.uint8, device=device)


def unpack(exp_avg: Tensor, exp_avg_sq: Tensor, blocks: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """New fp32 tensors of the same shapes.

    Args:
        exp_avg, exp_avg_sq: bf16, or uint8 codes with `blocks`; contiguous.
        blocks: exponents of both, uint8, one per `BLOCK` values in memory order.
    """
    if blocks is None:
        return exp_avg.float(), exp_avg_sq.float()
    first, second = (
        _decode(codes, exponent, *form)
        for codes, exponent, form in zip((exp_avg, exp_avg_sq), blocks, (_FIRST, _SECOND), strict=True)
    )
    return first, second


def pack(
    words: tuple[Tensor, Tensor],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    blocks: tuple[Tensor, Tensor] | None = None,
    seed: int | None = None,
) -> None:
    """Writes both fp32 moments in `unpack`'s format; rounds to nearest without `seed`."""
    bits = [word.contiguous().view(torch.int32).view(-1) for word in words]
    sizes = [each & _MASK for each in bits]
    noise = (None, None) if seed is None else _noise(sizes[0], sizes[1], seed)
    for place, target in enumerate((exp_avg, exp_avg_sq)):
        # NaN stays NaN.
        size = sizes[place].clamp_max(_NAN)
        if blocks is None:
            upper = (size + _shifted(noise[place], _BF16)) >> _BF16
            code = (upper | ((bits[place] >> 16) & 0x8000)).to(torch.int16).view(torch.bfloat16)
        else:
            code = _encode(size, bits[place] < 0, noise[place], blocks[place], second=place == 1)
        target.view(-1).copy_(code)


def _decode(codes: Tensor, exponent: Tensor, cut: int, span: int) -> Tensor:
    code = codes.view(-1).to(torch.int32)
    base = (exponent.to(torch.int32) - span).repeat_interleave(BLOCK)[: code.numel()] * (1 << 23)
    size = ((code & 0x7F) << cut) + base
    # Excludes code 0 and fp32 subnormals.
    size = torch.where(((code & 0x7F) > 0) & (size >= 1 << 23), size, 0)
    return torch.where(code >= 0x80, size | ~_MASK, size).view(torch.float32).view(codes.shape)


def _encode(size: Tensor, negative: Tensor, noise: Tensor | None, exponent: Tensor, second: bool) -> Tensor:
    cut, span = _SECOND if second else _FIRST
    missing = exponent.numel() * BLOCK - size.numel()
    largest = torch.nn.functional.pad(size, (0, missing)).view(-1, BLOCK).amax(dim=1) if size.numel() else size
    # The power of two below the largest, unless rounding could reach the next.
    top = (largest + (1 << cut) - 1) >> 23
    exponent.copy_(top.to(torch.uint8))
    base = (top - span).repeat_interleave(BLOCK)[: size.numel()] * (1 << (23 - cut))
    code = ((size + _shifted(noise, cut)) >> cut) - base
    lowest = (size > 0).to(torch.int32) if second else torch.zeros_like(size)
    # Subnormals have no code and count as smallest.
    code = torch.where(size >> 23 > 0, code, 0).clamp(lowest, torch.full_like(code, 0x7F))
    return torch.where(negative, code | 0x80, code).to(torch.uint8)


def _shifted(noise: Tensor | None, cut: int) -> Tensor | int:
    """Addend before truncation to `cut` bits: 16 random bits, or one half for rounding to nearest."""
    return 1 << (cut - 1) if noise is None else noise << (cut - 16)


def _noise(first: Tensor, second: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """16 random bits each, from a hash of both (final steps: C. Wellons' lowbias32)."""
    x = (second * _signed(0x9E3779B1) + first) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * _signed(factor)
    return x & 0xFFFF, (x >> 16) & 0xFFFF


def _signed(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
