"""Reference of cross_entropy, and passes for devices without own kernels.

Row blocks bound fp32 copies. Comparing for the target avoids scatter and synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.rows import precision

# 16 MiB as fp32.
_BLOCK = 1 << 22


def statistics(rows: Tensor, target: Tensor, start: int) -> Tensor:
    count, width = rows.shape
    out = rows.new_empty((3, count), dtype=precision(rows.dtype))
    for block in blocks(count, width):
        wide = rows[block].to(out.dtype)  # [t, V]
        top = torch.amax(wide, dim=-1, out=out[0, block])
        column = target[block] - start
        here = (column >= 0) & (column < width)
        picked = wide.gather(1, column.clamp(0, width - 1)[:, None])[:, 0]
        out[2, block] = torch.where(here, picked, 0.0)
        # Avoids -inf - -inf = NaN; such a row becomes zeros.
        base = torch.where(top == -torch.inf, 0.0, top)
        torch.sum((wide - base[:, None]).exp_(), dim=-1, out=out[1, block])
    return out


def gradient(rows: Tensor, target: Tensor, start: int, statistics: Tensor, dloss: Tensor, out: Tensor) -> None:
    top, sums = statistics
    count, width = rows.shape
    columns = torch.arange(start, start + width, device=rows.device)
    for block in blocks(count, width):
        wide = (rows[block].to(top.dtype) - top[block, None]).exp_().div_(sums[block, None])  # [t, V]
        wide.sub_((columns == target[block, None]).to(wide.dtype))
        out[block] = wide.mul_(dloss[block, None])


def blocks(count: int, width: int) -> list[slice]:
    step = count if traced.dry else max(1, _BLOCK // width)
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]
