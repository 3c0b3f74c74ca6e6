"""permute and unpermute: against what Megatron's dispatchers compute, with sorts of the map and sums by scatter_add.

Every token goes to TOPK experts, its rows are weighted and summed again; probs are fp32 as a router makes them. Only
what is in between differs from a layer: the experts are left out.

Counted as bytes: forward reads each token and writes its rows, reads the rows and writes the sums; backward the same
with gradients, and the rows again for the gradient of probs. The map and what there is per row are left out. Counted as
operations on each number of a row: 2 forward (times prob, sum), 4 backward (times prob, product with the row, two
sums). None of them is a matmul's.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.permute import permute, unpermute


def shapes(device: str, quick: bool) -> list[str]:
    """Many small experts, and few large ones."""
    if quick:
        return ["512x256x16x4"]
    return ["4096x512x64x6", "2048x1024x8x2"] + ([] if device == "cpu" else ["8192x7168x256x8"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `TOKENSxHIDDENxEXPERTSxTOPK`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None or int(match[4]) > int(match[3]):
        raise ValueError("want TOKENSxHIDDENxEXPERTSxTOPK, each at least 1 and TOPK of EXPERTS, like 4096x512x64x6")
    tokens, hidden, experts, topk = (int(number) for number in match.groups())
    count = tokens * topk
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2)).topk(topk, 1).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
        probs = torch.rand(tokens, experts, generator=generator).mul_(routing_map)
        wide = torch.promote_types(dtype, torch.float32)
        return x.requires_grad_(), probs.to(device, wide).requires_grad_()

    def routes(x: torch.Tensor) -> torch.Tensor:
        nonlocal routing_map
        if routing_map.device != x.device:
            routing_map = routing_map.to(x.device)
        return routing_map

    def ours(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, _, row_ids = permute(x, routes(x), None, count, topk=topk)
        return unpermute(rows, row_ids, (tokens, hidden), probs, routes(x))

    def plain(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        by_expert = routes(x).t().contiguous()
        token = by_expert.reshape(-1).argsort(descending=True, stable=True)[:count] % tokens
        rows = x.index_select(0, token) * probs.t().contiguous().masked_select(by_expert).unsqueeze(-1)
        sums = torch.zeros(tokens, hidden, dtype=rows.dtype, device=x.device)
        return sums.scatter_add(0, token.unsqueeze(1).expand(-1, hidden), rows).to(x.dtype)

    one, many = tokens * hidden * dtype.itemsize, count * hidden * dtype.itemsize
    forward = Work(2 * (one + many), 2 * count * hidden)
    backward = Work(2 * one + 3 * many, 4 * count * hidden)
    return Case(
        operator="permute",
        name=f"{tokens}x{hidden}x{experts}x{topk} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(
            Contender(OURS, lambda: ours),
            Contender(TORCH, lambda: plain),
            compiled(lambda: plain),
        ),
    )
