"""Says what features hide that overlap communication with compute: `python -m lab.queues` writes the page.

Their schedules are recorded (`schedules`) and run on 8 hardware queues and on one, as CUDA_DEVICE_MAX_CONNECTIONS sets.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.schedules import COMPUTE, FLOPS, FROM_HOST, HOST, LINK, MEMORY, MESSAGES, TO_HOST, Op, Recorder
from mindspeed_lite.memory.copy_engine import CopyEngine
from mindspeed_lite.memory.offload import Offload
from mindspeed_lite.memory.swapped_optimizer_state import SwappedOptimizerState
from mindspeed_lite.parallel import overlapped_gemm
from mindspeed_lite.parallel.compressed_reduce import CompressedReduce
from mindspeed_lite.parallel.context.layout import zigzag
from mindspeed_lite.parallel.context.ring import Ring
from mindspeed_lite.parallel.expert import exchange
from mindspeed_lite.parallel.tp_linear import TPCommConfig, column_linear, fixed_chunks
from mindspeed_lite.platform.side_stream import DeviceStream, SideStream

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "queues.md"


class Times(NamedTuple):
    """Seconds of a schedule: until its last op ends, and of what runs on each unit."""

    total: float
    units: dict[str, float]

    @property
    def hidden(self) -> float:
        """Share of messages and copies that overlaps with compute or with each other."""
        others = sum(seconds for unit, seconds in self.units.items() if unit != COMPUTE)
        return 1 - (self.total - self.units.get(COMPUTE, 0.0)) / others


def simulate(ops: Sequence[Op], connections: int) -> Times:
    """Run ops on hardware queues, one per connection and direction of copies; streams are mapped to them in turn.

    A queue starts its ops in the order of issue: one that must wait holds up all after it, of any stream. A unit runs
    one op at a time. The host is always ahead.
    """
    copies = {op.stream: op.unit for op in ops if op.unit in (TO_HOST, FROM_HOST)}
    queues: dict[Any, deque[int]] = {}
    before: dict[int, int] = {}
    needs: list[list[int]] = []
    for number, op in enumerate(ops):
        queues.setdefault((op.stream % connections, copies.get(op.stream)), deque()).append(number)
        needs.append([*op.waits, *([before[op.stream]] if op.stream in before else [])])
        before[op.stream] = number
    ends: dict[int, float] = {}
    free: dict[str, float] = {}
    started = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        heads = []
        for place, queue in queues.items():
            if queue and all(each in ends for each in needs[queue[0]]):
                begins = [started[place], free.get(ops[queue[0]].unit, 0.0), *(ends[each] for each in needs[queue[0]])]
                heads.append((max(begins), queue[0], place))
        start, number, place = min(heads, key=lambda head: head[:2])
        queues[place].popleft()
        started[place] = start
        ends[number] = start + ops[number].seconds
        if ops[number].unit:
            free[ops[number].unit] = ends[number]
    units: dict[str, float] = {}
    for op in ops:
        if op.unit:
            units[op.unit] = units.get(op.unit, 0.0) + op.seconds
    return Times(max(ends.values(), default=0.0), units)


class Group(NamedTuple):
    """Stands in for a process group."""

    name: str
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


# Of one rank: 70B-like layers of 8192 tokens over 8 tensor ranks, and smaller ones.
TOKENS, HIDDEN, WIDE = 8192, 8192, 7168
TENSOR, EXPERTS, CONTEXT, SECOND = Group("tensor", 8), Group("experts", 8), Group("context", 4), Group("second", 4)


def empty(*shape: int, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def gathered_product(recorder: Recorder, device: str = "meta") -> None:
    x, w = empty(TOKENS // 8, HIDDEN, device=device), empty(HIDDEN, WIDE, device=device)
    overlapped_gemm.gather_matmul(x, w, TENSOR, 4)  # type: ignore[arg-type]


def product_scattered(recorder: Recorder) -> None:
    overlapped_gemm.matmul_scatter(empty(TOKENS, WIDE), empty(WIDE, HIDDEN), TENSOR, 4).wait()  # type: ignore[arg-type]


def product_reduced(recorder: Recorder) -> None:
    overlapped_gemm.matmul_reduce(empty(TOKENS, WIDE), empty(WIDE, HIDDEN), TENSOR, 4).wait()  # type: ignore[arg-type]


def column_backward(recorder: Recorder, chunks: int = 4, sequence_parallel: bool = True) -> None:
    """Gradients of a column parallel layer: its input's are reduced while the weight's is computed."""
    x = empty(TOKENS // 8 if sequence_parallel else TOKENS, HIDDEN).requires_grad_()
    w = empty(WIDE, HIDDEN).requires_grad_()
    comm = TPCommConfig(TENSOR, sequence_parallel, fixed_chunks(chunks))  # type: ignore[arg-type]
    y = column_linear(x, w, None, comm)
    recorder.forget()
    y.backward(empty(TOKENS, WIDE))  # type: ignore[no-untyped-call]


def shared_expert(recorder: Recorder, message: Any = None) -> None:
    """Tokens leave for experts while the shared expert computes."""
    x, weight = empty(TOKENS, 4096), empty(4096, 4096)
    messages = exchange.Messages()
    messages.begin()
    message = message or exchange.AllToAll(None, None, EXPERTS)  # type: ignore[arg-type]
    out = exchange.issue(x, message, messages, False)
    shared = x @ weight
    messages.wait()
    (out @ weight)[:TOKENS].add_(shared)


def gathered_tokens(recorder: Recorder) -> None:
    shared_expert(recorder, exchange.AllGather(Group("few experts", 2)))  # type: ignore[arg-type]


def compressed_gradients(recorder: Recorder) -> None:
    """A bucket's gradients travel while the layer before computes its own."""
    numel, weight = 4096 * 4096, empty(4096, 4096)
    reduce = CompressedReduce(numel, torch.device("meta"), EXPERTS, "int8", scatters=True)  # type: ignore[arg-type]
    for _ in range(2):
        pending = reduce.start(empty(numel).float(), 8)
        empty(TOKENS, 4096) @ weight
        pending.wait()


def expert_gradients(recorder: Recorder) -> None:
    """Backward of experts: gradients of weights on the side stream, while those of tokens travel."""
    side = SideStream(DeviceStream(torch.device("meta")))
    dy, x, weight = empty(TOKENS, 4096), empty(TOKENS, 4096), empty(4096, 4096)
    send = exchange.AllToAll(None, None, EXPERTS)  # type: ignore[arg-type]
    for _ in range(2):
        dy = send.run(dy)
        for _ in range(2):
            dx = dy @ weight
            side.submit(lambda dy=dy: dy.t() @ x)  # type: ignore[misc]
            dy = dx
        dy = send.run(dy)
    side.wait_all()


def ring(recorder: Recorder) -> None:
    class Blocks:
        """Two products of each block, for those of attention."""

        layout, rank, band = zigzag(4 * 4096, 4), 0, (-1, -1)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, owner: int, partial: Any) -> None:
            torch.bmm(torch.bmm(q, k.transpose(1, 2)), v)

    q, k, v = (empty(heads, 4096, 128) for heads in (8, 8, 8))
    Ring(CONTEXT, SECOND).forward(q, k, v, Blocks(), None)  # type: ignore[arg-type]


def layers(recorder: Recorder) -> None:
    """Activations of four layers to the host and back."""
    offload = Offload(Engine(recorder), "cpu")
    x = empty(4096, 4096, device="cpu").requires_grad_()
    sizes = [(4096, 16384), (16384, 4096)] * 4
    weights = [empty(*size, device="cpu").requires_grad_() for size in sizes]
    with offload.forward_pass():
        for place in range(4):
            own = weights[2 * place : 2 * place + 2]
            with offload.layer(place, own) as on_output, offload.saving():
                for weight in own:
                    x = x @ weight
            on_output(x)
    x.sum().backward()  # type: ignore[no-untyped-call]


def optimizer_step(recorder: Recorder) -> None:
    """Moments of sixteen parameters from the host and back, in eight groups."""
    state = SwappedOptimizerState(Engine(recorder), 8)
    parameters = [torch.empty(1 << 22) for _ in range(16)]
    moments = [{name: torch.empty(1 << 22) for name in ("exp_avg", "exp_avg_sq")} for _ in parameters]
    for parameter, own in zip(parameters, moments, strict=True):
        state.place(parameter, own)
    recorder.forget()
    for group in state.update_groups(parameters):
        for parameter, own in zip(parameters[group], moments[group], strict=True):
            for each in own.values():
                parameter.add_(each.mul_(0.9))


class Engine(CopyEngine):
    """Copies to host memory of a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"))
        self.allocate = recorder.pinned  # type: ignore[method-assign]


# By feature: what it overlaps.
SCHEDULES: dict[str, dict[str, Callable[[Recorder], None]]] = {
    "use_ascend_coc": {
        "gather, product": gathered_product,
        "product, reduce-scatter": product_scattered,
        "product, all-reduce": product_reduced,
        "column parallel, backward": column_backward,
        "column parallel of all tokens, backward": functools.partial(column_backward, sequence_parallel=False),
    },
    "moe_alltoall_overlap_comm": {"tokens to experts, shared expert": shared_expert},
    "moe_allgather_overlap_comm": {"tokens to experts, shared expert": gathered_tokens},
    "grad_reduce_compression": {"gradients in 8 bits, backward": compressed_gradients},
    "moe_wgrad_side_stream": {"gradients of experts": expert_gradients},
    "context_parallel_algo": {"keys and values in a ring": ring},
    "swap_attention": {"activations of four layers": layers},
    "swap_optimizer": {"moments of a step": optimizer_step},
}


def record(schedule: Callable[[Recorder], None]) -> Recorder:
    with Recorder() as recorder:
        schedule(recorder)
    return recorder


def page() -> str:
    lines = [
        "# What overlap features hide",
        "",
        "**A simulation, not a measurement.** `python -m lab.queues` records what each feature issues to which stream",
        "and runs it on hardware queues: 8, or one with `CUDA_DEVICE_MAX_CONNECTIONS=1`. A queue starts kernels in the",
        "order of issue; copies have queues of their own. Kernels do not share a multiprocessor. Products take",
        f"{FLOPS / 1e12:.0f} TFLOP/s, memory {MEMORY / 1e12:.0f} TB/s, links between GPUs {LINK / 1e9:.0f} GB/s and",
        f"the host {HOST / 1e9:.0f} GB/s each way.",
        "",
        "Hidden: share of messages and copies that overlaps with computation or with each other, with 8 queues / one.",
        f"Slow: links of a third, {LINK / 3e9:.0f} GB/s.",
        "",
        "| Feature | Schedule | Computation | Messages, copies | Hidden | Hidden, slow |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for feature, schedules in SCHEDULES.items():
        for name, schedule in schedules.items():
            ops = record(schedule).ops
            slow = [op._replace(seconds=3 * op.seconds) if op.unit == MESSAGES else op for op in ops]
            units = simulate(ops, 1).units
            hidden = (" / ".join(f"{simulate(each, queues).hidden:.0%}" for queues in (8, 1)) for each in (ops, slow))
            lines.append(
                f"| [{feature}](../features/{feature}.md) | {name} | {1e3 * units[COMPUTE]:.2f} ms "
                f"| {1e3 * (sum(units.values()) - units[COMPUTE]):.2f} ms | {' | '.join(hidden)} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
