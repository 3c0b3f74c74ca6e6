"""Fused all-to-all and grouped GEMM (CANN MC2) for experts, on Ascend NPUs over HCCL.

`dispatch_linear` is the dispatch and first GEMM, `linear_combine` the last GEMM and combine. Each is the other's
gradient with respect to its rows. Unsupported calls run unfused.

Source: documentation of torch_npu.npu_alltoallv_gmm and npu_gmm_alltoallv (op-plugin 7.3), and of CANN's
    aclnnAlltoAllvGroupedMatMul and aclnnGroupedMatMulAlltoAllv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lite.ops.grouped_matmul import TakeGradients, grouped_matmul
from mindspeed_lite.ops.permute import sort_chunks
from mindspeed_lite.parallel.mc2 import communicator

from .exchange import AllToAll

# Atlas A3: group ranks, experts per rank and group, columns, message bytes.
RANKS = (8, 16, 32, 64, 128)
MOST_EXPERTS_OF_RANK, MOST_EXPERTS = 32, 256
WIDTH_LIMIT = 65536
LEAST_BYTES, MOST_BYTES = 2 << 20, 100 << 20


class ExpertCounts(NamedTuple):
    """Rows sent to each expert, and received by rank and local expert."""

    sent: list[int]
    received: list[int]

    def of_experts(self, ranks: int) -> list[int]:
        each = len(self.received) // ranks
        return [sum(self.received[expert::each]) for expert in range(each)]


class RowsOfRank(NamedTuple):
    """Fewest and most rows that any rank sends or receives."""

    least: int
    most: int

    @classmethod
    def of_group(cls, counts: ExpertCounts, group: dist.ProcessGroup, device: torch.device) -> RowsOfRank:
        """Smallest and largest row counts over the group, by an all-reduce: the same on every rank."""
        totals = sum(counts.sent), sum(counts.received)
        found = torch.tensor([-min(totals), max(totals)], device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        less, most = found.tolist()
        return cls(-less, most)


def why_not(x: Tensor, width: int, experts: int, rows: RowsOfRank, ranks: int) -> list[str]:
    """Reasons why the operators cannot multiply rows x [T, K] by weights [K, width]; the same on all ranks.

    experts: of this rank.
    """
    reasons = []
    if x.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{x.dtype}: the operators take float16 or bfloat16")
    if ranks not in RANKS:
        reasons.append(f"{ranks} ranks: the operators take {', '.join(map(str, RANKS))}")
    if experts > MOST_EXPERTS_OF_RANK or experts * ranks > MOST_EXPERTS:
        reasons.append(
            f"{experts} experts on each of {ranks} ranks: the operators take {MOST_EXPERTS_OF_RANK}, and "
            f"{MOST_EXPERTS} in all"
        )
    if max(x.shape[1], width) >= WIDTH_LIMIT:
        reasons.append(f"{max(x.shape[1], width)} columns: the operators take less than {WIDTH_LIMIT}")
    narrowest, widest = sorted((x.shape[1], width))
    if rows.least * narrowest * x.element_size() < LEAST_BYTES:
        reasons.append(
            f"a rank with {rows.least} rows of {narrowest} columns has less than 2 MiB, the least message of the "
            "operators"
        )
    if rows.most * widest * x.element_size() > MOST_BYTES:
        reasons.append(
            f"a rank with {rows.most} rows of {widest} columns has more than 100 MiB, the largest message of the "
            "operators: a smaller --micro-batch-size"
        )
    return reasons


@dataclass(frozen=True)
class AlltoAllMC2:
    """Exchange of one batch; `log` gets fallback reasons."""

    group: dist.ProcessGroup
    counts: ExpertCounts
    rows: RowsOfRank
    log: Callable[[str], None]

    def dispatch_linear(self, x: Tensor, weights: Sequence[Tensor], take_gradients: TakeGradients) -> Tensor:
        """x [T, K] by expert of the group -> x w_e^T [A, N] by local expert, with weights w_e [N, K].

        take_gradients: as for `ops.grouped_matmul`.
        """
        y: Tensor = _Exchanged.apply(x, self, True, take_gradients, *weights)  # type: ignore[no-untyped-call]
        return y

    def linear_combine(self, x: Tensor, weights: Sequence[Tensor], take_gradients: TakeGradients) -> Tensor:
        """x [A, K] by local expert -> x w_e^T [T, N] by expert of the group."""
        y: Tensor = _Exchanged.apply(x, self, False, take_gradients, *weights)  # type: ignore[no-untyped-call]
        return y

    def arrive(self, x: Tensor, weights: Sequence[Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
        """(outputs, received rows); with w_e^T if `transposed`, else with w_e."""
        sent, received, ranks = *self.counts, self.group.size()
        if self._is_served(x, weights, transposed):
            name = communicator(self.group, x.device)
            import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

            y, _, arrived = torch_npu.npu_alltoallv_gmm(
                x.contiguous(), torch.stack([*weights]), name, ranks, sent, received,
                trans_gmm_weight=transposed, permute_out_flag=True,
            )  # fmt: skip
            return y, arrived
        rows = AllToAll(_by_rank(received, ranks), _by_rank(sent, ranks), self.group).run(x)
        arrived, _ = sort_chunks(rows, received, _transposed(len(received), ranks))
        return grouped_matmul(arrived, weights, self.counts.of_experts(ranks), transposed=transposed), arrived

    def leave(self, x: Tensor, weights: Sequence[Tensor], transposed: bool) -> Tensor:
        sent, received, ranks = *self.counts, self.group.size()
        if self._is_served(x, weights, transposed):
            name = communicator(self.group, x.device)
            import torch_npu

            y, _ = torch_npu.npu_gmm_alltoallv(
                x.contiguous(), torch.stack([*weights]), name, ranks, received, sent, trans_gmm_weight=transposed
            )
            return y  # type: ignore[no-any-return]
        y = grouped_matmul(x, weights, self.counts.of_experts(ranks), transposed=transposed)
        by_expert = [received[place] for place in _transposed(len(received), ranks)]
        rows, _ = sort_chunks(y, by_expert, _transposed(len(received), len(received) // ranks))
        return AllToAll(_by_rank(sent, ranks), _by_rank(received, ranks), self.group).run(rows)

    def _is_served(self, x: Tensor, weights: Sequence[Tensor], transposed: bool) -> bool:
        width = weights[0].shape[0 if transposed else 1]
        reasons = why_not(x, width, len(weights), self.rows, self.group.size())
        if reasons:
            self.log("; ".join(reasons))
        return not reasons


def _by_rank(counts: list[int], ranks: int) -> list[int]:
    each = len(counts) // ranks
    return [sum(counts[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def _transposed(chunks: int, parts: int) -> list[int]:
    each = chunks // parts
    return [part * each + place for place in range(each) for part in range(parts)]


class _Exchanged(torch.autograd.Function):
    """GEMM after the dispatch (`arrives`) or before the combine; each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mc2: AlltoAllMC2, arrives: bool, take_gradients: TakeGradients, *weights: Tensor
    ) -> Tensor:
        ctx.mc2, ctx.arrives, ctx.take_gradients = mc2, arrives, take_gradients
        y, rows = mc2.arrive(x, weights, True) if arrives else (mc2.leave(x, weights, True), x)
        ctx.save_for_backward(rows, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dx, dy = (ctx.mc2.leave(dy, weights, False), dy) if ctx.arrives else ctx.mc2.arrive(dy, weights, False)
        counts = ctx.mc2.counts.of_experts(ctx.mc2.group.size())
        return dx, None, None, None, *ctx.take_gradients(dy, x, counts)
