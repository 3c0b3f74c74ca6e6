"""Recorded schedules: what one hardware queue hides, and races between streams."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lab import queues, schedules
from lab.queues import OTHERS, SCHEDULES, gathered_product, record
from lab.schedules import simulate
from mindspeed_lite.memory.copy_engine import CopyEngine
from mindspeed_lite.memory.offload import Offload, _Group
from mindspeed_lite.parallel.balance.copies import ExpertCopies
from mindspeed_lite.parallel.expert.exchange import Messages
from mindspeed_lite.pipeline.run import Executor
from mindspeed_lite.platform.side_stream import Job, SideStream
from tests.harness.checkouts import ROOT
from tests.harness.sources import FEATURE_FILES, files, imports, module_name

BY_FEATURE = [*SCHEDULES.items(), *OTHERS.items()]
NAMES = {f"{feature}: {name}": each for feature, named in BY_FEATURE for name, each in named.items()}
# Where work leaves the current stream.
ISSUES = re.compile(
    r"\b(DeviceStream|SideStream|CopyEngine)\(|\.Stream\(|async_op=True|isend_irecv\(|overlap_p2p_comm=True|:ScheduleNode"
)
ELSEWHERE = {
    "mindspeed_lite/bench/selftest/device.py": "a self-test of one device",
    "patches/adaptive_memory.py": "copies are timed before the training",
    "patches/moe_fb_overlap.py": "Megatron's nodes, which `two_microbatches` makes",
    "patches/moe_wgrad_side_stream.py": "the stream that `expert_gradients` makes",
    "patches/swap_attention.py": "the engine that `layers` makes",
    "patches/swap_optimizer.py": "the engine that `optimizer_step` makes",
}
# Features that import such a file, of another feature, and issue nothing of their own.
OF_OTHERS = {
    "adaptive_memory": "swap_attention",
    "delay_wgrad_compute": "moe_fb_overlap",
    "enable_expert_placement": "balanced_moe_experts",
    "gradient_accumulation_fusion": "use_ascend_coc",
    "moe_alltoall_mc2": "moe_alltoall_overlap_comm",
    "moe_grouped_gemm": "moe_wgrad_side_stream",
    "moe_hierarchical_alltoallv": "moe_alltoall_overlap_comm",
    "moe_permute_fusion": "moe_alltoall_overlap_comm",
    "moe_record_load": "moe_alltoall_overlap_comm",
    "moe_router_fusion": "moe_alltoall_overlap_comm",
    "moe_tp_extend_ep": "moe_alltoall_overlap_comm",
    "pipeline_schedule": "schedules_method",
    "recompute_in_bubble": "schedules_method",
    "use_ascend_mc2": "use_ascend_coc",
    "use_fused_linear_cross_entropy": "use_ascend_coc",
    "use_fused_linear_log_prob": "use_ascend_coc",
}


def test_one_queue_shows_messages_that_are_issued_before_all_products() -> None:
    issued_in_turn = record(gathered_product).ops
    all_first = record(functools.partial(gathered_product, device="cpu")).ops  # the order of a device without queues
    assert [simulate(issued_in_turn, each).hidden for each in (8, 1)] == pytest.approx([1, 1])
    assert simulate(all_first, 8).hidden == pytest.approx(1) and simulate(all_first, 1).hidden < 0.3


def test_chunks_change_nothing_where_a_gather_precedes_them() -> None:
    one, four = (record(functools.partial(queues.column_backward, chunks=each)).ops for each in (1, 4))
    assert one == four


def test_the_page_is_what_is_issued() -> None:
    """After a change: `python -m lab.queues`."""
    assert queues.PAGE.read_text() == queues.page()


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_used_in_the_order_of_streams(name: str) -> None:
    recorder = record(NAMES[name])
    assert recorder.ops and recorder.errors == []


def test_every_place_that_leaves_the_current_stream_is_in_a_schedule() -> None:
    sources = {str(path): path.read_text().splitlines() for path in files("mindspeed_lite", "patches")}
    places = {
        (name, number) for name, lines in sources.items() for number, line in enumerate(lines, 1) if ISSUES.search(line)
    }
    traced, ran = {name for name, _ in places}, set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        ran.add((name, frame.f_lineno))
        return trace if name in traced else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for each in NAMES.values():
            record(each)
    finally:
        sys.settrace(before)
    left = {(str(Path(name).relative_to(ROOT)), number) for name, number in places - ran}
    assert {name for name, _ in left} == ELSEWHERE.keys(), sorted(left)


def test_features_that_leave_the_current_stream_have_a_schedule() -> None:
    by_module = {module_name(path): path for path in files("mindspeed_lite", "patches") if path.name != "__init__.py"}
    issues = {name for name, path in by_module.items() if ISSUES.search(path.read_text())}

    def reached(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            each = left.pop()
            if each not in found:
                found.add(each)
                left += [*(imports(by_module[each]) & by_module.keys())]
        return found

    leaving = {path.stem for path in FEATURE_FILES if reached(module_name(path)) & issues}
    checked = {name for name, _ in BY_FEATURE}
    assert leaving - checked == OF_OTHERS.keys()
    assert checked >= {*OF_OTHERS.values()}
    assert not leaving & {"virtual_optimizer", "param_gather_once"}


class NeverWaits(schedules.Stream):
    def wait_event(self, event: schedules.Event) -> None: ...


def nothing(*_: Any) -> None: ...


def lets_go_of_sent_tensors(self: Executor) -> None:
    (sent, _), self.sending = self.sending, ([], None)
    self._let_go(sent)


def forgets_jobs(self: SideStream, job: Job) -> None:
    self._running.append((lambda: None, self._executor.run(job)))


def frees_at_once(self: Offload, group: _Group | None) -> None:
    for each in group.alive() if group is not None and group.sent is not None else ():
        self._let_go(each)


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "name", "words"),
    [
        (
            schedules,
            "Stream",
            NeverWaits,
            "swap_optimizer: moments of a step",
            "copy_ on stream 1 does not wait for mul_",
        ),
        (
            schedules._Work,
            "wait",
            bool,
            "use_ascend_coc: gather, product",
            "mm on stream 0 does not wait for all_gather",
        ),
        (schedules._Work, "wait", bool, "context_parallel_algo: keys and values in a ring", "does not wait for send"),
        (
            schedules._Work,
            "wait",
            bool,
            "context_parallel_algo: their gradients in a double ring",
            "does not wait for send",
        ),
        (Executor, "finish_sending", lets_go_of_sent_tensors, "schedules_method: pipeline messages", "freed memory"),
        (queues.SharedEvent, "wait", nothing, "moe_fb_overlap: two micro-batches", "does not wait for all_to_all"),
        (ExpertCopies, "wait", nothing, "balanced_moe_experts: copies of experts", "does not wait for broadcast"),
        (Messages, "wait", nothing, "moe_zero_memory: rows exchanged again", "does not wait for all_to_all"),
        (CopyEngine, "wait", nothing, "sleep: a model wakes", "does not wait for copy_"),
        (SideStream, "submit", forgets_jobs, "moe_wgrad_side_stream: gradients of experts", "freed memory on stream 0"),
        (Offload, "_free", frees_at_once, "swap_attention: activations of four layers", "freed memory on stream 0"),
    ],
)
def test_a_planted_race_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, attribute: str, value: object, name: str, words: str
) -> None:
    monkeypatch.setattr(owner, attribute, value)
    assert any(words in each for each in record(NAMES[name]).errors)
