"""Recorded schedules: what one hardware queue hides, and races between streams."""

from __future__ import annotations

import functools

import pytest

from lab import queues, schedules
from lab.queues import SCHEDULES, gathered_product, record, simulate
from mindspeed_lite.memory.offload import Offload, _Group
from mindspeed_lite.platform.side_stream import Job, SideStream

NAMES = {f"{feature}: {name}": each for feature, named in SCHEDULES.items() for name, each in named.items()}


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


class NeverWaits(schedules.Stream):
    def wait_event(self, event: schedules.Event) -> None: ...


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
        (SideStream, "submit", forgets_jobs, "moe_wgrad_side_stream: gradients of experts", "freed memory on stream 0"),
        (Offload, "_free", frees_at_once, "swap_attention: activations of four layers", "freed memory on stream 0"),
    ],
)
def test_a_planted_race_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, attribute: str, value: object, name: str, words: str
) -> None:
    monkeypatch.setattr(owner, attribute, value)
    assert any(words in each for each in record(NAMES[name]).errors)
