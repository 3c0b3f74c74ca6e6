"""Breakdown of a training step by category, from torch's profiler.

CPU: self time of operators. Accelerator: kernels count for the launching operator; idle time is `other`.
"""

from __future__ import annotations

import bisect
import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Breakdown = dict[str, Any]
Interval = tuple[int, int]

CATEGORIES: tuple[str, ...] = (
    "linear",
    "attention",
    "norm",
    "activation",
    "rotary",
    "embedding",
    "moe",
    "loss",
    "optimizer",
    "gradient accumulation and reduction",
    "communication exposed",
    "copies",
    "other",
)
REDUCTION, COMMUNICATION, COPIES, OTHER = CATEGORIES[9:]

PREFIX = "mindspeed_lite::"
STEP = PREFIX + "step"

_NODE = "autograd::engine::evaluate_function: "
_COLLECTIVE = re.compile(r"c10d::|_?c10d_functional|gloo:|nccl|hccl|hcom_|record_param_comms", re.IGNORECASE)
_GROUPED = re.compile(r"_GroupedMatmul(Backward)?$")
_LAUNCH = re.compile(r"(cuda|cu|hip|acl|aclrt)[A-Z]")
_PRODUCTS = "linear|matmul|mm|bmm|mv|addmm|addmv|baddbmm|einsum|_grouped_mm|_scaled_mm|mkldnn_linear"
_COPIES = "copy_|_foreach_copy_|to|clone|contiguous|cat|stack|index_select|gather|repeat|repeat_interleave|.*_copy"
_BY_NAME: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("linear", re.compile(rf"aten::({_PRODUCTS})$")),
    ("attention", re.compile(r"aten::.*(scaled_dot_product|flash_attention|efficient_attention)")),
    (COPIES, re.compile(rf"aten::({_COPIES})$|Memcpy")),
    ("optimizer", re.compile(r"Optimizer\.(step|zero_grad)#")),
)


@dataclass(frozen=True)
class Event:
    """A profiler event, in nanoseconds.

    sequence: autograd node number. forward_thread: thread that created the node, 0 outside backward. id, linked: a
    kernel's launch has `id`; `linked` is the launching operator.
    """

    name: str
    start: int
    end: int
    thread: int = 1
    sequence: int = -1
    forward_thread: int = 0
    is_async: bool = False
    is_device: bool = False
    id: int = 0
    linked: int = 0


class _Decision(NamedTuple):
    category: str
    scoped: bool


_UNKNOWN = _Decision(OTHER, False)


@dataclass
class _Placed:
    """An event with its innermost enclosing event `outer`; own: nanoseconds outside nested events."""

    event: Event
    decision: _Decision
    own: int
    outer: _Placed | None


@functools.cache
def _of_name(name: str) -> _Decision:
    if name.startswith(PREFIX):
        category = name[len(PREFIX) :]
        return _Decision(category, True) if category in CATEGORIES else _UNKNOWN
    if name.startswith(_NODE):
        return _Decision(REDUCTION, True) if name.endswith("AccumulateGrad") else _UNKNOWN
    if _COLLECTIVE.match(name):
        return _Decision(COMMUNICATION, True)
    if _GROUPED.match(name):
        return _Decision("linear", True)
    return next((_Decision(category, False) for category, names in _BY_NAME if names.match(name)), _UNKNOWN)


def _place(events: Iterable[Event]) -> list[_Placed]:
    placed: list[_Placed] = []
    stacks: dict[int, list[_Placed]] = defaultdict(list)
    # By thread. An operator records the next autograd node's number: the last operator up to a number created its node.
    nodes: dict[int, list[tuple[int, _Decision]]] = defaultdict(list)
    for event in sorted(events, key=lambda each: (each.start, -each.end, each.id)):
        stack = stacks[event.thread]
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        outer = stack[-1] if stack else None
        decision = _of_name(event.name)
        if not decision.scoped:
            created = nodes[event.forward_thread] if event.forward_thread and event.sequence >= 0 else []
            last = bisect.bisect_right(created, event.sequence, key=lambda each: each[0])
            forward, around = created[last - 1][1] if last else _UNKNOWN, outer.decision if outer else _UNKNOWN
            # Without a scope the outermost known name counts, such as a GEMM around a copy.
            known = around if around.scoped or around.category != OTHER else decision
            decision = forward if forward.scoped else known
        if event.sequence >= 0 and not event.forward_thread and not _COLLECTIVE.match(event.name):
            nodes[event.thread].append((event.sequence, decision))
        own = (min(event.end, outer.event.end) if outer else event.end) - event.start
        if outer:
            outer.own -= own
        stack.append(_Placed(event, decision, own, outer))
        placed.append(stack[-1])
    return placed


def _union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted((max(start, window[0]), min(end, window[1])) for start, end in intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def attribute(events: Sequence[Event]) -> Breakdown:
    """Break down the event named STEP. Raises ValueError without one."""
    step = next((each for each in events if each.name == STEP and not each.is_device), None)
    if step is None:
        raise ValueError(f"there is no event `{STEP}` among the {len(events)} events of the profiler")
    host = [each for each in events if not each.is_device]
    spans = [each for each in host if each.is_async]
    launches = {each.id: each.start for each in host if not each.is_async and _LAUNCH.match(each.name)}
    placed = _place(each for each in host if not each.is_async and not _LAUNCH.match(each.name))
    kernels = [each for each in events if each.is_device and not each.name.startswith((PREFIX, "nccl:", "hccl:"))]
    times, total = _of_kernels(step, kernels, placed, launches) if kernels else _of_host(step, spans, placed)
    wall = step.end - step.start
    times[OTHER] += wall - sum(times.values())
    exposed = times[COMMUNICATION]
    return {
        "wall_seconds": wall / 1e9,
        "categories": {category: times[category] / 1e9 for category in CATEGORIES},
        "communication": {
            "total_seconds": max(total, exposed) / 1e9,
            "exposed_seconds": exposed / 1e9,
            "hidden_seconds": max(total - exposed, 0) / 1e9,
        },
    }


Times = tuple[dict[str, int], int]


def _of_host(step: Event, spans: list[Event], placed: list[_Placed]) -> Times:
    """Nanoseconds by category, and of communication."""
    times = dict.fromkeys(CATEGORIES, 0)
    busy = [(each.start, each.end) for each in spans if _COLLECTIVE.match(each.name)]
    for each in placed:
        if each.event.thread == step.thread and step.start <= each.event.start < step.end:
            times[each.decision.category] += each.own
            if each.decision.category == COMMUNICATION:
                busy.append((each.event.start, each.event.end))
    return times, _length(_union(busy, (step.start, step.end)))


def _of_kernels(step: Event, kernels: list[Event], placed: list[_Placed], launches: dict[int, int]) -> Times:
    """Nanoseconds by category, and of communication; the first of overlapping kernels counts."""
    operators = {each.event.id: each.decision for each in placed}
    starts = [each.event.start for each in placed]

    def category(kernel: Event) -> str:
        named = _of_name(kernel.name).category
        if named == COMMUNICATION:
            return named
        found = operators.get(kernel.linked) if kernel.linked else None
        if found is None and kernel.id in launches:
            # Not launched by an operator: use a scope or node open at the launch.
            moment = launches[kernel.id]
            before = reversed(placed[: bisect.bisect_right(starts, moment)])
            found = next((each.decision for each in before if each.event.end >= moment), None)
        return named if found is None or found.category == OTHER else found.category

    times = dict.fromkeys(CATEGORIES, 0)
    communication: list[Interval] = []
    computing: list[Interval] = []
    covered = step.start
    for kernel in sorted(kernels, key=lambda each: each.start):
        kind = category(kernel)
        (communication if kind == COMMUNICATION else computing).append((kernel.start, kernel.end))
        start, end = max(kernel.start, covered), min(kernel.end, step.end)
        if kind != COMMUNICATION and start < end:
            times[kind] += end - start
            covered = end
    window = (step.start, step.end)
    total, either = (_length(_union(each, window)) for each in (communication, communication + computing))
    times[COMMUNICATION] = either - _length(_union(computing, window))
    return times, total


def read(results: Any) -> list[Event]:
    """Convert `kineto_results` without building torch's tree of events."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    return [
        Event(
            name=each.name(),
            start=each.start_ns(),
            end=each.end_ns(),
            thread=each.start_thread_id(),
            sequence=each.sequence_nr(),
            forward_thread=each.fwd_thread_id(),
            is_async=each.is_async() or each.start_thread_id() != each.end_thread_id(),
            is_device=each.device_type() != DeviceType.CPU,
            id=each.correlation_id(),
            linked=each.linked_correlation_id(),
        )
        for each in results.events()
    ]


def _accelerator() -> tuple[str | None, Callable[[], Any]]:
    import torch
    from torch.profiler import ProfilerActivity

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None, lambda: None
    activity = ProfilerActivity.CUDA if accelerator.type == "cuda" else ProfilerActivity.PrivateUse1
    known: Any = torch.profiler.supported_activities
    return accelerator.type if activity in known() else None, torch.accelerator.synchronize


def profile(step: Callable[[], T], trace: Path | None) -> tuple[T, Breakdown]:
    """Profile one step; return its result and breakdown; optionally write a Chrome trace."""
    # torch.profiler imports the compiler, which takes seconds and memory.
    from torch.autograd import profiler

    device, synchronize = _accelerator()
    recording: Any = profiler.profile(use_device=device, use_kineto=True)
    with recording:
        synchronize()
        with profiler.record_function(STEP):
            result = step()
            synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(trace))
    return result, attribute(read(recording.kineto_results))


def merge(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Means over processes."""
    means = {
        group: {key: statistics.fmean(each[group][key] for each in breakdowns) for key in breakdowns[0][group]}
        for group in ("categories", "communication")
    }
    return {
        "wall_seconds": statistics.fmean(each["wall_seconds"] for each in breakdowns),
        **means,
        "processes": len(breakdowns),
    }
