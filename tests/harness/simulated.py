"""What a job calls `before` features are on: a device's streams emulated, events logged, messages late, ranks lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.harness.lanes import Lanes, LateLane

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
EXCHANGES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


def log_first(owner: Any, name: str, text: str, when: Callable[..., bool] = lambda *args: True) -> None:
    """Log `text` at the first call of a function whose arguments fulfil `when`, which is asked at each call."""
    own, logged = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args) and not logged:
            logged.append(True)
            print(text, flush=True)
        return own(*args, **kwargs)

    setattr(owner, name, call)


# ---------------------------------------------------------------------------------------------------------------------
# Streams and operators of a device


def _copy_engine(bandwidth: float) -> Lanes:
    """Lanes that log the first copy back, and fail the run if memory was freed before it had been copied."""
    lanes = Lanes(bandwidth)

    def is_intact(*args: Any) -> bool:
        assert not lanes.faults, "memory was freed before it had been copied"
        return True

    log_first(lanes, "h2d", "the first bytes came back", is_intact)
    return lanes


def swap_optimizer(bandwidth: float = 1e9) -> None:
    """Let `--swap-optimizer` run on CPU, over lanes of that many bytes a second, for tensors of a small model."""
    from mindspeed_lite.memory import swapped_optimizer_state
    from mindspeed_lite.patches import swap_optimizer as patch

    swapped_optimizer_state._SMALLEST = 64
    patch._no_copy_engine = lambda device: []
    patch.CopyEngine = lambda device: _copy_engine(bandwidth)


def swap_attention(bandwidth: float = 2e9) -> None:
    """Let `--swap-attention` run on CPU, over lanes of that many bytes a second, for storages of any size."""
    from mindspeed_lite.memory import offload
    from mindspeed_lite.patches import swap_attention as patch

    patch._why_not_here = lambda device: []
    patch.CopyEngine = lambda device: _copy_engine(bandwidth)
    offload.SMALLEST = 1


def virtual_optimizer() -> None:
    """Let `--virtual-optimizer` take moments of a small model."""
    from mindspeed_lite.memory import host_mapped_moments

    host_mapped_moments._SMALLEST = 64


def moe_wgrad_side_stream(delay: float = 0.01) -> None:
    """Let `--moe-wgrad-side-stream` run on CPU, over a thread in which every job is up to so many seconds late."""
    from mindspeed_lite.patches import moe_wgrad_side_stream as patch

    def executor(device: Any) -> LateLane:
        lane = LateLane(delay)
        wait = lane.wait

        def checked(mark: Any) -> None:
            wait(mark)
            assert not lane.faults, "memory was freed before it had been read"

        lane.wait = checked  # type: ignore[method-assign]
        log_first(lane, "wait", "a gradient came from the side")
        return lane

    patch._why_not_here = lambda device: []
    patch.DeviceStream = executor


def streams() -> None:
    """All of these."""
    swap_optimizer()
    swap_attention()
    moe_wgrad_side_stream()


def alltoall_mc2() -> None:
    """Let `--moe-alltoall-mc2` run on CPU, with CANN's operators over gloo and no least sizes."""
    import sys

    import torch.distributed as dist

    from mindspeed_lite.parallel.expert import alltoall_mc2
    from mindspeed_lite.patches import moe_alltoall_mc2 as patch
    from tests.harness.fused_collectives import alltoall_mc2_operators

    def communicator(group: Any, device: Any) -> str:
        sys.modules["torch_npu"] = alltoall_mc2_operators(group)  # type: ignore[assignment]
        return f"hccl-{dist.get_rank()}"

    alltoall_mc2.communicator = communicator
    log_first(alltoall_mc2, "communicator", "exchange and product in one")
    alltoall_mc2.RANKS, alltoall_mc2.LEAST_BYTES = (2, 4), 0
    patch._why_not_here = lambda device: []


def late_messages(delay: float = 0.01) -> None:
    """Emulate streams whose collectives finish up to so many seconds late, and log that one was pending."""
    from lab import lanes, streams
    from mindspeed_lite import platform

    platform.activate()
    streams.install()
    own_put = lanes.Lane.put

    def put(self: Any, finish: Any, *tensors: Any, **more: Any) -> None:
        def late() -> None:
            time.sleep(random.random() * delay)
            finish()

        own_put(self, late, *tensors, **more)

    lanes.Lane.put = put
    log_first(lanes.Lane, "put", "a message is in flight")


# ---------------------------------------------------------------------------------------------------------------------
# Routers


def idle_rank() -> None:
    """Send all tokens to the first half of the experts."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    own = TopKRouter.gating

    def gating(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = own(self, *args, **kwargs)
        experts = torch.arange(logits.shape[-1], device=logits.device)
        return logits - 100.0 * (experts >= logits.shape[-1] // 2).to(logits.dtype)

    TopKRouter.gating = gating


def skewed_router() -> None:
    """Experts of the first half have 4 times the tokens of the others."""
    from tests.harness.skewed_router import install

    install(4.0)


# ---------------------------------------------------------------------------------------------------------------------
# Events of experts


def counted_messages() -> None:
    """Log that a weight gradient was computed while a message of the exchange was in flight."""
    from mindspeed_lite.parallel.expert.exchange import Messages

    log_first(Messages, "run_jobs", "a weight gradient overlaps", lambda self: self._jobs and self._works)


def counted_levels() -> None:
    """Log that rows of tokens were sent between nodes."""
    from mindspeed_lite.parallel.expert import hierarchy

    log_first(hierarchy.Path, "spread", "rows crossed nodes once")


def shared_expert_overlaps() -> None:
    """Log that both parts of the shared expert ran while a message of the exchange was in flight, in both passes."""
    from mindspeed_lite.parallel.expert.exchange import Messages
    from mindspeed_lite.patches import moe_allgather_overlap_comm as patch

    counted_messages()
    send, first, second = Messages.send, patch._SharedExpert.first, patch._SharedExpert.second
    seen: set[str] = set()
    last: list[Any] = []

    def note(what: str) -> None:
        if last[0]._works and what not in seen:
            seen.add(what)
            print(f"{what} overlaps", flush=True)

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
    """Log that rows which had been released came back by a message."""
    from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows

    def is_again(self: Any) -> bool:
        if self._released is None or self._collective is None:
            return False
        assert not self._released._values.untyped_storage().nbytes(), "they were still here"
        return True

    log_first(RecomputedRows, "arrive", "rows were exchanged again", is_again)


def copied_experts() -> None:
    """Log that experts were copied."""
    from mindspeed_lite.parallel.balance import copies

    log_first(copies.CopyPlan, "make", "experts were copied")


def drawn(seed: int) -> Any:
    """In the place of `placement.chosen`: places at random, the same on all ranks."""
    chance = random.Random(seed)

    def chosen(loads: Any, before: Any, ranks: int, price: float = 0.0) -> list[int]:
        after, local = [0] * len(loads), len(loads) // ranks
        for slot in range(local):
            for expert, rank in zip(range(slot, len(loads), local), chance.sample(range(ranks), ranks), strict=True):
                after[expert] = rank
        return after

    return chosen


def drawn_placements() -> None:
    """Let experts change places at random at every placement, and log that they are exchanged."""
    from mindspeed_lite.parallel.balance import placement, placer

    placement.chosen = drawn(1)
    own = placer.exchange

    def exchange(*args: Any) -> int:
        sent = own(*args)
        if sent:
            print("experts changed places", flush=True)
        return sent

    placer.exchange = exchange


def killed_between_exchanges() -> None:
    """The same, and ranks die once experts are home for the second checkpoint, which is not written by then."""
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
                _killed()

    patch._Placements.go_home = go_home


# ---------------------------------------------------------------------------------------------------------------------
# Messages that are late, and ranks that are lost


def count(
    longest_delay: float = 0.0,
    dies_after: int | None = None,
    names: Sequence[str] = COLLECTIVES,
    is_async: bool = True,
) -> None:
    """Count calls by name at run time, asynchronous ones or all; Megatron's linear layers took theirs when they were
    imported."""
    import torch.distributed as dist

    sent = 0
    chance = random.Random(int(os.environ["RANK"]))

    def around(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            if kwargs.get("async_op") or not is_async:
                sent += 1
                time.sleep(chance.random() * longest_delay)
                if sent == dies_after:
                    os._exit(9)
            return original(*args, **kwargs)

        return collective

    for name in names:
        changed = around(getattr(dist, name))
        # The device layer wraps what it finds in the second.
        setattr(dist, name, changed)
        setattr(dist.distributed_c10d, name, changed)
    ended = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        print(f"messages sent in flight: {sent}", flush=True)
        ended(*args, **kwargs)

    dist.destroy_process_group = destroy_process_group


def sent(log: str) -> int:
    """What a job's rank counted."""
    return int(log.rpartition("messages sent in flight: ")[2].split()[0])


def delay() -> None:
    """Up to 5 ms before each message, different on every rank."""
    count(5e-3)


def delay_exchanges() -> None:
    """Up to 3 ms before each message of an exchange, different on every rank."""
    count(3e-3, names=EXCHANGES, is_async=False)


def die() -> None:
    """Rank 1 ends in the middle of a training, between two slices."""
    count(dies_after=1001 if os.environ["RANK"] == "1" else None)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Act before call `number` of a function."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def killed() -> None:
    """Rank 1 is killed in the third step; KILLED="NAME NUMBER": before a call of torch.distributed's in it."""
    import torch.distributed
    from megatron.training import training

    def in_the_step() -> None:
        name, _, number = os.environ.get("KILLED", "").partition(" ")
        if name:
            _at_call(torch.distributed, name, int(number), _killed)
        else:
            _killed()

    if os.environ["RANK"] == "1":
        _at_call(training, "train_step", 3, in_the_step)


def single_samples() -> None:
    """A fault: `--balance-sequence-lengths` takes micro-batches apart."""
    from mindspeed_lite.parallel.balance import lengths

    init = lengths.StepOrder.__init__

    def __init__(self: Any, first: int, total: int, step: int, micro_batch: int, *rest: Any, **more: Any) -> None:
        init(self, first, total, step, 1, *rest, **more)

    lengths.StepOrder.__init__ = __init__  # type: ignore[method-assign]
