"""The two moments in fewer bits than fp32, stochastically rounded.

bf16    the upper half of an fp32 number.
fp8     a byte per number and a byte per `BLOCK` of them, the exponent of the largest, rounded up. A first moment has
        sign, 4 bits of exponent below its block's and 3 of mantissa, a second one 5 and 2. Code 0 is zero. A first
        moment of less than about 2^-15 of its block's largest becomes zero; a second moment never does, since the step
        divides by it.

A moment moves by a small part of itself per step, less than the distance of two codes: rounding to nearest would hold
it. The random bits are a hash of both new moments and the count of steps, so the same numbers give the same bits on
every rank and in every run. All of it is integer arithmetic on the bits of fp32, the same on every device. The sign of
a second moment is kept (see `halves`).
"""

from __future__ import annotations

import torch

BLOCK = 128

_MASK = 0x7FFFFFFF
_NAN = 0x7FC00000
# Bits of fp32 that are cut off, and exponents below the block's largest that there are codes for.
_FIRST, _SECOND = (20, 15), (21, 31)
_BF16 = 16


def seed(step: float) -> int:
    """What the count of steps adds to the hash, as a signed 32-bit number."""
    return _signed(int(step) * 0x9E3779B1)


def exponents(size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Zeros for the blocks of `size` numbers in fp8."""
    return torch.zeros(-(-size // BLOCK), dtype=torch.uint8, device=device)


def unpack(
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New fp32 tensors, in the shapes of these.

    Args:
        exp_avg, exp_avg_sq: bf16, or uint8 codes with `blocks`; contiguous.
        blocks: the exponents of both, uint8, one for every `BLOCK` numbers in memory order.
    """
    if blocks is None:
        return exp_avg.float(), exp_avg_sq.float()
    first, second = (
        _decode(codes, exponent, *form)
        for codes, exponent, form in zip((exp_avg, exp_avg_sq), blocks, (_FIRST, _SECOND), strict=True)
    )
    return first, second


def pack(
    words: tuple[torch.Tensor, torch.Tensor],
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor] | None = None,
    seed: int | None = None,
) -> None:
    """Write both moments (fp32) into what `unpack` reads; rounded to nearest if there is no `seed`."""
    bits = [word.contiguous().view(torch.int32).view(-1) for word in words]
    sizes = [each & _MASK for each in bits]
    noise = (None, None) if seed is None else _noise(sizes[0], sizes[1], seed)
    for place, target in enumerate((exp_avg, exp_avg_sq)):
        # A NaN of any payload stays one.
        size = sizes[place].clamp_max(_NAN)
        if blocks is None:
            upper = (size + _shifted(noise[place], _BF16)) >> _BF16
            code = (upper | ((bits[place] >> 16) & 0x8000)).to(torch.int16).view(torch.bfloat16)
        else:
            code = _encode(size, bits[place] < 0, noise[place], blocks[place], second=place == 1)
        target.view(-1).copy_(code)


def _decode(codes: torch.Tensor, exponent: torch.Tensor, cut: int, span: int) -> torch.Tensor:
    code = codes.view(-1).to(torch.int32)
    base = (exponent.to(torch.int32) - span).repeat_interleave(BLOCK)[: code.numel()] * (1 << 23)
    size = ((code & 0x7F) << cut) + base
    # Neither code 0 nor what fp32 would hold as a subnormal.
    size = torch.where(((code & 0x7F) > 0) & (size >= 1 << 23), size, 0)
    return torch.where(code >= 0x80, size | ~_MASK, size).view(torch.float32).view(codes.shape)


def _encode(
    size: torch.Tensor, negative: torch.Tensor, noise: torch.Tensor | None, exponent: torch.Tensor, second: bool
) -> torch.Tensor:
    cut, span = _SECOND if second else _FIRST
    missing = exponent.numel() * BLOCK - size.numel()
    largest = torch.nn.functional.pad(size, (0, missing)).view(-1, BLOCK).amax(dim=1) if size.numel() else size
    # That of the power of two below the largest, unless rounding could reach the next one.
    top = (largest + (1 << cut) - 1) >> 23
    exponent.copy_(top.to(torch.uint8))
    base = (top - span).repeat_interleave(BLOCK)[: size.numel()] * (1 << (23 - cut))
    code = ((size + _shifted(noise, cut)) >> cut) - base
    lowest = (size > 0).to(torch.int32) if second else torch.zeros_like(size)
    # A subnormal number has no code, and counts as less than any.
    code = torch.where(size >> 23 > 0, code, 0).clamp(lowest, torch.full_like(code, 0x7F))
    return torch.where(negative, code | 0x80, code).to(torch.uint8)


def _shifted(noise: torch.Tensor | None, cut: int) -> torch.Tensor | int:
    """16 random bits as the `cut` bits that are added before cutting; half of them for rounding to nearest."""
    return 1 << (cut - 1) if noise is None else noise << (cut - 16)


def _noise(first: torch.Tensor, second: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """16 bits for each, from a hash of both (its last steps: C. Wellons' lowbias32)."""
    x = (second * _signed(0x9E3779B1) + first) ^ seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * _signed(factor)
    return x & 0xFFFF, (x >> 16) & 0xFFFF


def _signed(number: int) -> int:
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
