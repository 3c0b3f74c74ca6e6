"""Stand-ins for what a device has and this machine has not; a job names one as its `before`."""

from __future__ import annotations

import random
import time
from typing import Any

from tests.harness.lanes import Lanes, LateLane


class _Said(Lanes):
    """Says that something came back, and fails the run if memory was freed before it had been copied."""

    def h2d(self, *args: Any) -> Any:
        assert not self.faults, "memory was freed before it had been copied"
        if not self.moved["back"]:
            print("the first bytes came back", flush=True)
        return super().h2d(*args)


def swap_optimizer(bandwidth: float = 1e9) -> None:
    """Let `--swap-optimizer` stand on CPU, over lanes with so many bytes a second, for tensors of a small model."""
    from mindspeed_lite.memory import swapped_optimizer_state
    from mindspeed_lite.patches import swap_optimizer as patch

    swapped_optimizer_state._SMALLEST = 64
    patch._no_copy_engine = lambda device: []
    patch.CopyEngine = lambda device: _Said(bandwidth)


def swap_attention(bandwidth: float = 2e9) -> None:
    """Let `--swap-attention` stand on CPU, over lanes with so many bytes a second, for storages of any size."""
    from mindspeed_lite.memory import offload
    from mindspeed_lite.patches import swap_attention as patch

    patch._why_not_here = lambda device: []
    patch.CopyEngine = lambda device: _Said(bandwidth)
    offload.SMALLEST = 1


def late_messages(delay: float = 0.01) -> None:
    """Emulate streams whose collectives finish up to so many seconds late, and say that one was pending."""
    from lab import lanes, streams
    from mindspeed_lite import platform

    platform.activate()
    streams.install()
    own_put, said = lanes.Lane.put, []

    def put(self: Any, finish: Any, *tensors: Any, **more: Any) -> None:
        if not said:
            said.append(True)
            print("a message travels beside", flush=True)

        def late() -> None:
            time.sleep(random.random() * delay)
            finish()

        own_put(self, late, *tensors, **more)

    lanes.Lane.put = put


def counted_messages() -> None:
    """Say that a weight gradient was computed while a message of the exchange was under way."""
    from mindspeed_lite.parallel.expert.exchange import Messages

    own, said = Messages.run_jobs, []

    def run_jobs(self: Any) -> None:
        if self._jobs and self._works and not said:
            said.append(True)
            print("a weight gradient beside a message", flush=True)
        own(self)

    Messages.run_jobs = run_jobs


def counted_levels() -> None:
    """Say that rows of tokens were sent between nodes."""
    from mindspeed_lite.parallel.expert import hierarchy

    own, said = hierarchy.Path.spread, []

    def spread(self: Any, x: Any) -> Any:
        if not said:
            said.append(True)
            print("rows crossed nodes once", flush=True)
        return own(self, x)

    hierarchy.Path.spread = spread


def alltoall_mc2() -> None:
    """Let `--moe-alltoall-mc2` stand on CPU, with CANN's operators over gloo and no least sizes."""
    import sys

    import torch.distributed as dist

    from mindspeed_lite.parallel.expert import alltoall_mc2
    from mindspeed_lite.patches import moe_alltoall_mc2 as patch
    from tests.harness.fused_collectives import alltoall_mc2_operators

    said = []

    def communicator(group: Any, device: Any) -> str:
        sys.modules["torch_npu"] = alltoall_mc2_operators(group)  # type: ignore[assignment]
        if not said:
            said.append(True)
            print("exchange and product in one", flush=True)
        return f"hccl-{dist.get_rank()}"

    alltoall_mc2.communicator = communicator
    alltoall_mc2.RANKS, alltoall_mc2.LEAST_BYTES = (2, 4), 0
    patch._why_not_here = lambda device: []


def shared_expert_beside_messages() -> None:
    """Say that both parts of the shared expert ran while a message of the exchange was under way, in both passes."""
    from mindspeed_lite.parallel.expert.exchange import Messages
    from mindspeed_lite.patches import moe_allgather_overlap_comm as patch

    counted_messages()
    send, first, second = Messages.send, patch._SharedExpert.first, patch._SharedExpert.second
    seen: set[str] = set()
    last: list[Any] = []

    def note(what: str) -> None:
        if last[0]._works and what not in seen:
            seen.add(what)
            print(f"{what} beside a message", flush=True)

    def sending(self: Any, *args: Any) -> Any:
        last[:] = [self]
        return send(self, *args)

    def first_part(self: Any) -> Any:
        if self._middle is None:
            note("its first part")
            found = first(self)
            if found.grad_fn is not None:
                found.register_hook(lambda _: note("its second backward part"))
                found.grad_fn.next_functions[0][0].register_hook(lambda *_: note("its first backward part"))
        return first(self)

    def second_part(self: Any) -> Any:
        if self._output is None:
            note("its second part")
        return second(self)

    Messages.send = sending
    patch._SharedExpert.first, patch._SharedExpert.second = first_part, second_part


def rows_exchanged_again() -> None:
    """Say that rows which had been released came back by a message."""
    from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows

    own, said = RecomputedRows.arrive, []

    def arrive(self: Any) -> None:
        if self._released is not None and self._collective is not None and not said:
            assert not self._released._values.untyped_storage().nbytes(), "they were still here"
            said.append(True)
            print("rows were exchanged again", flush=True)
        own(self)

    RecomputedRows.arrive = arrive


def a_rank_without_tokens() -> None:
    """Send all tokens to the first half of the experts, and say that rows came back."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    rows_exchanged_again()
    own = TopKRouter.gating

    def gating(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = own(self, *args, **kwargs)
        experts = torch.arange(logits.shape[-1], device=logits.device)
        return logits - 100.0 * (experts >= logits.shape[-1] // 2).to(logits.dtype)

    TopKRouter.gating = gating


class _SaidLate(LateLane):
    """Says that a job was run, and fails the run if what a job reads was not kept for it."""

    _said = False

    def wait(self, mark: Any) -> None:
        super().wait(mark)
        assert not self.faults, "memory was freed before it had been read"
        if not self._said:
            self._said = True
            print("a gradient came from the side", flush=True)


def moe_wgrad_side_stream(delay: float = 0.01) -> None:
    """Let `--moe-wgrad-side-stream` stand on CPU, over a thread in which every job is up to so many seconds late."""
    from mindspeed_lite.patches import moe_wgrad_side_stream as patch

    patch._why_not_here = lambda device: []
    patch.DeviceStream = lambda device: _SaidLate(delay)


def skewed_router() -> None:
    """Experts of the first half have 4 times the tokens of the others."""
    from tests.harness.skewed_router import install

    install(4.0)


def copied_experts() -> None:
    """The same, and say that experts were copied."""
    from mindspeed_lite.parallel.balance import copies

    own, said = copies.CopyPlan.make, []

    def make(self: Any, given: Any) -> Any:
        if not said:
            said.append(True)
            print(f"{len(self.owners)} experts were copied", flush=True)
        return own(self, given)

    copies.CopyPlan.make = make
    skewed_router()


def seen_messages() -> None:
    """Say after each step how often messages of experts were waited for, by lane, and the bytes that were sent."""
    import json

    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    from lab import expert_messages
    from lab.timeline import COMBINE, DISPATCH, WAIT, Timeline
    from tests.harness import core_loop

    seen, own = Timeline(), core_loop.Training.step
    seen.install()
    expert_messages.install(seen)
    # Megatron, which is imported before it here, holds them by value.
    mappings.dist_all_gather_func = dist.all_gather_into_tensor
    mappings.dist_reduce_scatter_func = dist.reduce_scatter_tensor

    def step(self: Any) -> Any:
        with seen:
            found = own(self)
        waits = [each.name for each in seen.spans if each.lane == WAIT]
        told = {"dispatch": waits.count(DISPATCH), "combine": waits.count(COMBINE), "bytes": sum(seen.sent.values())}
        assert 0 < seen.waited_for_experts <= seen.waited
        print(f"messages of experts: {json.dumps(told)}", flush=True)
        return found

    core_loop.Training.step = step  # type: ignore[method-assign]


def drawn(seed: int) -> Any:
    """In the place of `placement.chosen`: places at random, all ranks alike."""
    chance = random.Random(seed)

    def chosen(loads: Any, before: Any, ranks: int, price: float = 0.0) -> list[int]:
        after, local = [0] * len(loads), len(loads) // ranks
        for slot in range(local):
            for expert, rank in zip(range(slot, len(loads), local), chance.sample(range(ranks), ranks), strict=True):
                after[expert] = rank
        return after

    return chosen


def drawn_placements() -> None:
    """Let experts change places at random at every placement, and say that they moved."""
    from mindspeed_lite.parallel.balance import placement, placer

    own, said = placer.exchange, []

    def exchange(*args: Any) -> int:
        sent = own(*args)
        if sent and not said:
            said.append(True)
            print("experts changed places", flush=True)
        return sent

    placement.chosen, placer.exchange = drawn(1), exchange


def killed_between_exchanges() -> None:
    """The same, and ranks die once experts are home for the second checkpoint, which is not written by then."""
    import os
    import signal

    from mindspeed_lite.patches import enable_expert_placement as patch

    drawn_placements()
    own, times = patch._Placements.go_home, []

    def go_home(self: Any) -> None:
        moved = [each for each in self.layers.values() if not each.is_home]
        own(self)
        if moved:
            times.append(True)
            print(f"home {len(times)}", flush=True)
            if len(times) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    patch._Placements.go_home = go_home
