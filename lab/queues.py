"""Says what features hide that overlap communication with compute: `python -m lab.queues` writes the page.

Their schedules are recorded (`schedules`) and run on 8 hardware queues and on one, as CUDA_DEVICE_MAX_CONNECTIONS sets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.schedules import COMPUTE, FLOPS, HOST, LINK, MEMORY, MESSAGES, Event, Recorder, Stream, simulate
from mindspeed_lite.memory.copy_engine import CopyEngine
from mindspeed_lite.memory.offload import Offload
from mindspeed_lite.memory.sleep import Sleeper
from mindspeed_lite.memory.swapped_optimizer_state import SwappedOptimizerState
from mindspeed_lite.parallel import overlapped_gemm
from mindspeed_lite.parallel.balance.copies import CopyPlan, PendingGradients
from mindspeed_lite.parallel.compressed_reduce import CompressedReduce
from mindspeed_lite.parallel.context.blocks import Sums
from mindspeed_lite.parallel.context.layout import zigzag
from mindspeed_lite.parallel.context.ring import Ring
from mindspeed_lite.parallel.expert import exchange
from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows
from mindspeed_lite.parallel.tp_linear import TPCommConfig, column_linear, fixed_chunks
from mindspeed_lite.patches import moe_fb_overlap
from mindspeed_lite.patches._shared.pipeline_passes import OverlappedTransport
from mindspeed_lite.patches.optimize_send_recv_comm import _in_two_groups
from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.program import compile_program
from mindspeed_lite.pipeline.run import Executor
from mindspeed_lite.platform.side_stream import DeviceStream, SideStream

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "queues.md"


class Group(NamedTuple):
    """Stands in for a process group."""

    name: str
    ranks: int
    place: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


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
    (out @ weight)[:TOKENS].add_(shared[: len(out)])


def gathered_tokens(recorder: Recorder) -> None:
    shared_expert(recorder, exchange.AllGather(Group("few experts", 2)))  # type: ignore[arg-type]


def scattered_tokens(recorder: Recorder) -> None:
    shared_expert(recorder, exchange.ReduceScatter(Group("few experts", 2)))  # type: ignore[arg-type]


def recomputed_rows(recorder: Recorder) -> None:
    """Rows of experts are freed after their product, and travel again during the backward pass."""
    x, dy, weight = empty(TOKENS, 4096), empty(TOKENS, 4096), empty(4096, 4096)
    message = exchange.AllToAll(None, None, EXPERTS)  # type: ignore[arg-type]
    received = message.run(x)
    received @ weight
    again = RecomputedRows(x.clone, message, torch.clone)
    again.release(received)
    again.leave()
    dy @ weight.t()
    again.arrive()
    received.t() @ dy


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


class Blocks:
    """Two products of each block, for those of attention, and five of its gradient."""

    layout, rank, band = zigzag(4 * 4096, 4), 0, (-1, -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, owner: int, partial: Any) -> None:
        torch.bmm(torch.bmm(q, k.transpose(1, 2)), v)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, owner: int, sums: Sums
    ) -> None:
        p, dp = torch.bmm(q, k.transpose(1, 2)), torch.bmm(dout, v.transpose(1, 2))
        sums.dq.add_(torch.bmm(dp, k))
        sums.dk.add_(torch.bmm(dp.transpose(1, 2), q))
        sums.dv.add_(torch.bmm(p.transpose(1, 2), dout))


def ring(recorder: Recorder, window: int = 1) -> None:
    q, k, v = (empty(8, 4096, 128) for _ in range(3))
    Ring(CONTEXT, SECOND, window).forward(q, k, v, Blocks(), None)  # type: ignore[arg-type]


def ring_backward(recorder: Recorder, window: int = 1) -> None:
    q, k, v, out, dout = (empty(8, 4096, 128) for _ in range(5))
    Ring(CONTEXT, SECOND, window).backward(dout, (q, k, v, out, out), {}, Blocks())  # type: ignore[arg-type]


def copied_experts(recorder: Recorder) -> None:
    """Two experts of others are copied here while own experts compute; their gradients leave in the backward pass."""
    own, like = (torch.nn.Parameter(empty(4096, 4096)) for _ in range(2))
    like.main_grad = torch.empty(4096, 4096, device="meta")  # type: ignore[attr-defined]
    pending = PendingGradients()
    x = empty(TOKENS, 4096).requires_grad_()
    for _ in range(2):
        copies = CopyPlan([0, 1], [like], EXPERTS, pending).make([[like], None])  # type: ignore[arg-type]
        y = x @ own
        copies.wait()
        for number in range(len(copies)):
            y = y + x @ copies.of(number)[0]
        x = y
    x.backward(empty(TOKENS, 4096))  # type: ignore[no-untyped-call]
    pending.finish()


class SharedEvent:
    """`torch.cuda.Event` of recorded streams."""

    _last: Event | None = None

    def record(self, stream: Stream) -> None:
        self._last = stream.record_event()

    def wait(self, stream: Stream) -> None:
        if self._last is not None:
            stream.wait_event(self._last)


class LaterWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: list[Callable[[], object]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.append(lambda: x.t() @ dy)
        return dy @ weight.t(), None, None


def two_microbatches(recorder: Recorder) -> None:
    """Forward of each micro-batch with the backward of the one before, on Megatron's nodes and its two streams."""
    from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode
    from megatron.core.tensor_parallel.mappings import all_to_all

    recorder.replace(torch.cuda, "stream", lambda stream: stream)
    compute, messages = recorder.current, Stream(recorder)
    weight = empty(4096, 4096)

    def layer() -> Any:
        event = SharedEvent()

        def product() -> Any:
            later: list[Callable[[], object]] = []
            made: Any = ScheduleNode(lambda x: LaterWgrad.apply(x, weight, later), compute, event)  # type: ignore[arg-type, no-untyped-call]

            def backward_dw() -> None:
                with made.stream_acquire_context():
                    later.pop(0)()

            made.backward_dw = backward_dw
            return made

        dispatch, combine = (
            ScheduleNode(functools.partial(all_to_all, EXPERTS), messages, event)  # type: ignore[arg-type]
            for _ in range(2)
        )
        return SimpleNamespace(
            attn=product(), moe_dispatch=dispatch, mlp=product(), moe_combine=combine,
            mtp_post_process=NoopScheduleNode(), get_low_precision_context=contextlib.nullcontext,
            config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
        )  # fmt: skip

    made: dict[str, Any] = {}
    session: Any = SimpleNamespace(state=lambda name, make: made.setdefault(name, make()))
    run = moe_fb_overlap._run(None, session)  # type: ignore[arg-type]
    before = None
    for each in (*(layer() for _ in range(4)), None):
        run(
            each, before, None if each is None else empty(TOKENS, 4096).requires_grad_(),
            None if before is None else empty(TOKENS, 4096),
        )  # fmt: skip
        before = each


class Passes:
    """A product for a model chunk."""

    releases = True

    def __init__(self) -> None:
        self.weight = empty(HIDDEN, HIDDEN)

    def forward(self, chunk: int) -> Callable[[int, Any], Tensor]:
        return lambda number, x: (empty(TOKENS, HIDDEN) if x is None else x) @ self.weight

    def backward(self, chunk: int) -> Callable[[int, Any, Any, Any], Tensor]:
        return lambda number, x, y, dy: (empty(TOKENS, HIDDEN) if dy is None else dy) @ self.weight

    def hand_over(self, output: Tensor) -> Tensor:
        return output.detach()

    def release(self, output: Tensor) -> None:
        output.data = empty(1)


def pipeline(recorder: Recorder, second: Any = None) -> None:
    """The second of four stages, two model chunks each."""
    from megatron.core.pipeline_parallel import p2p_communication

    group = Group("pipeline", 4, 1)
    session: Any = SimpleNamespace(state=lambda *_: {group: second or group})
    recorder.replace(p2p_communication, "_p2p_ops", _in_two_groups(p2p_communication._p2p_ops, session))
    recorder.replace(torch.cuda, "current_device", lambda: torch.device("meta"))
    config = SimpleNamespace(
        variable_seq_lengths=False, mtp_standalone=False, use_ring_exchange_p2p=False, batch_p2p_comm=False,
        pipeline_dtype=torch.bfloat16, timers=None, virtual_pipeline_model_parallel_size=2,
    )  # fmt: skip
    communicator = p2p_communication.P2PCommunicator(group, config)
    order = orders.build("interleaved", orders.PipelineShape(4, 8, 2))
    program = compile_program(order, 1, 1, "one way")
    with torch.no_grad():
        Executor(program, Passes(), OverlappedTransport(communicator, (TOKENS, HIDDEN))).run()  # type: ignore[arg-type]


def sleep(recorder: Recorder) -> None:
    """A model leaves the device and comes back before it computes."""
    model = torch.nn.Linear(4096, 4096, bias=False)
    sleeper = Sleeper(model, Engine(recorder))
    x = torch.empty(TOKENS, 4096)
    with torch.no_grad():
        model(x)
        sleeper.sleep([model], None, ["optimizer", "gradients"], None)
        sleeper.wake([])
        model(x)


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
    "moe_allgather_overlap_comm": {
        "tokens to experts, shared expert": gathered_tokens,
        "tokens from experts, shared expert": scattered_tokens,
    },
    "grad_reduce_compression": {"gradients in 8 bits, backward": compressed_gradients},
    "moe_wgrad_side_stream": {"gradients of experts": expert_gradients},
    "context_parallel_algo": {
        "keys and values in a ring": ring,
        "their gradients in a ring": ring_backward,
        "keys and values in a double ring": functools.partial(ring, window=2),
        "their gradients in a double ring": functools.partial(ring_backward, window=2),
    },
    "balanced_moe_experts": {"copies of experts": copied_experts},
    "moe_fb_overlap": {"two micro-batches": two_microbatches},
    "swap_attention": {"activations of four layers": layers},
    "swap_optimizer": {"moments of a step": optimizer_step},
}
# Not on the page: their times depend on other ranks or layers, or no step has them.
OTHERS: dict[str, dict[str, Callable[[Recorder], None]]] = {
    "schedules_method": {"pipeline messages": pipeline},
    "optimize_send_recv_comm": {
        "pipeline messages": functools.partial(pipeline, second=Group("pipeline's second", 4, 1))
    },
    "moe_zero_memory": {"rows exchanged again": recomputed_rows},
    "sleep": {"a model wakes": sleep},
}


def record(schedule: Callable[[Recorder], None]) -> Recorder:
    with Recorder() as recorder:
        schedule(recorder)
    return recorder


def page() -> str:
    lines = [
        "# What overlap features hide",
        "",
        "**A simulation, not a measurement.** `python -m lab.queues` runs what each feature issues on 8 hardware",
        "queues, or on one (`CUDA_DEVICE_MAX_CONNECTIONS=1`), which start kernels in the order of issue. Copies have",
        f"queues of their own. Products take {FLOPS / 1e12:.0f} TFLOP/s, memory {MEMORY / 1e12:.0f} TB/s, links",
        f"between GPUs {LINK / 1e9:.0f} GB/s, the host {HOST / 1e9:.0f} GB/s each way.",
        "",
        "Hidden: share of messages and copies that overlaps with computation or with each other, with 8 queues / one.",
        "Slow: links of a third.",
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
