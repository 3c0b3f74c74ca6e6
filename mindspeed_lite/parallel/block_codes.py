"""Gradients in 8 or 16 bits on the wire, in one byte tensor.

A row holds the codes of all values, padded to whole blocks of 64. With int8 and fp8 an fp32 scale for each block
follows, and a block with a NaN or an infinity decodes to NaN; bf16 has no scales and keeps each value's. Values are
converted in pieces that stay in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 64
SCALE_BYTES = 4
# Code -> dtype on the wire, largest magnitude (0: without scales).
FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0), "bf16": (torch.bfloat16, 0.0)}
_PIECE_VALUES = {"cpu": 1 << 17}
_PIECE_VALUES_ON_DEVICE = 1 << 24


class BlockCodes:
    """Encodes rows of `values` floats as `row_bytes` bytes, and decodes them."""

    def __init__(self, code: str, values: int) -> None:
        self.dtype, self._top = FORMATS[code]
        self.values, self.blocks = values, -(-values // BLOCK)
        self._code_bytes = self.blocks * BLOCK * self.dtype.itemsize
        self.row_bytes = self._code_bytes + (self.blocks * SCALE_BYTES if self._top else 0)

    def encode(self, row: Tensor, x: Tensor, residual: Tensor) -> None:
        """Write x + residual to `row`, and what rounding took to `residual`."""
        codes, scales = self._views(row)
        for first, last in self._pieces(x):
            values = torch.zeros((last - first) * BLOCK, dtype=torch.float32, device=x.device)
            place = slice(first * BLOCK, min(last * BLOCK, self.values))
            exact = values[: place.stop - place.start]
            exact.copy_(x[place]).add_(residual[place])
            blocks = values.view(-1, BLOCK)
            if self._top:
                scale = blocks.abs().amax(1, keepdim=True).div_(self._top)
                scales[first:last] = scale
                # A block too small for a scale stays in the residual; NaN and infinity are in the scale.
                inverse = torch.where(scale >= torch.finfo(torch.float32).tiny, 1 / scale, 0.0)
                rounded = blocks * inverse
                if self.dtype == torch.int8:
                    rounded.round_()
                codes[first:last] = rounded
                if self.dtype != torch.int8:
                    rounded.copy_(codes[first:last])
                rounded.mul_(scale)
            else:
                codes[first:last] = blocks
                rounded = codes[first:last].float()
            residual[place] = exact.sub_(rounded.view(-1)[: len(exact)]).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, row: Tensor, out: Tensor) -> None:
        """Write a row's values to `out`."""
        for place, values in self._decoded([row], out):
            out[place] = values

    def add(self, rows: Tensor, out: Tensor, divisor: int = 1) -> None:
        """Add the values of all rows to `out` in fp32, then divide."""
        for place, values in self._decoded(list(rows), out):
            values.add_(out[place])
            out[place] = values.div_(divisor) if divisor > 1 else values

    def _decoded(self, rows: list[Tensor], out: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(place, fp32 sum of the rows) for each piece."""
        views = [self._views(row) for row in rows]
        for first, last in self._pieces(out):
            found = torch.zeros(last - first, BLOCK, dtype=torch.float32, device=out.device)
            for codes, scales in views:
                if self._top:
                    found.addcmul_(codes[first:last].float(), scales[first:last])
                else:
                    found.add_(codes[first:last])
            place = slice(first * BLOCK, min(last * BLOCK, self.values))
            yield place, found.view(-1)[: place.stop - place.start]

    def _views(self, row: Tensor) -> tuple[Tensor, Tensor]:
        codes = row[: self._code_bytes].view(self.dtype).view(-1, BLOCK)
        return codes, row[self._code_bytes :].view(torch.float32).view(-1, 1)

    def _pieces(self, x: Tensor) -> Iterator[tuple[int, int]]:
        step = _PIECE_VALUES.get(x.device.type, _PIECE_VALUES_ON_DEVICE) // BLOCK
        for first in range(0, self.blocks, step):
            yield first, min(first + step, self.blocks)
