"""The executor, with threads as ranks and values as tensors: what each step is given, waits for and releases."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.pipeline import orders, recompute_plan, trace
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.program import compile_program
from mindspeed_lite.pipeline.run import Executor, Trace
from mindspeed_lite.pipeline.steps import Kind, OverlappedPair, Schedule, Step

TIMEOUT = 20.0


class Value:
    """Stands for a tensor: the stages and micro-batch it has passed; released, it holds nothing."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Passes:
    releases = True

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.log: list[tuple[str, Step | Any]] = []
        self.pairs = 0

    def _note(self, kind: Kind, chunk: int) -> Callable[[int], None]:
        return lambda microbatch: self.log.append(("step", Step(kind, chunk, microbatch)))

    def forward(self, chunk: int) -> Callable[[int, Value | None], Value]:
        stage, note = self.schedule.stage(self.rank, chunk), self._note(Kind.FORWARD, chunk)

        def forward(microbatch: int, received: Value | None) -> Value:
            assert (received.content if received else None) == (("F", stage - 1, microbatch) if stage else None)
            note(microbatch)
            return Value(("F", stage, microbatch))

        return forward

    def backward(self, chunk: int, kind: Kind = Kind.BACKWARD) -> Callable[..., Value]:
        stage, note = self.schedule.stage(self.rank, chunk), self._note(kind, chunk)
        is_last = stage == self.schedule.num_stages - 1

        def backward(microbatch: int, received: Value | None, output: Value, gradient: Value | None) -> Value:
            assert (gradient.content if gradient else None) == (None if is_last else ("B", stage + 1, microbatch))
            assert output.content == (("F", stage, microbatch) if is_last else None)
            is_recomputed = ("step", Step(Kind.RECOMPUTE, chunk, microbatch)) in self.log
            assert ((stage, microbatch) in self.schedule.recomputed) == is_recomputed
            note(microbatch)
            return Value(("B", stage, microbatch))

        return backward

    def input_grad(self, chunk: int) -> Callable[..., Value]:
        return self.backward(chunk, Kind.INPUT_GRAD)

    def recompute(self, chunk: int) -> Callable[[int], None]:
        return self._note(Kind.RECOMPUTE, chunk)

    def weight_grad(self, chunk: int) -> Callable[[int], None]:
        return self._note(Kind.WEIGHT_GRAD, chunk)

    def pair(self, ahead: int, back: int) -> Callable[..., tuple[Value, Value]]:
        forward, backward = self.forward(ahead), self.backward(back)

        def pair(microbatch: int, received: Value | None, *of_backward: Any) -> tuple[Value, Value]:
            self.pairs += 1
            return forward(microbatch, received), backward(*of_backward)

        return pair

    def hand_over(self, output: Value) -> Value:
        return Value(output.content)

    def release(self, output: Value) -> None:
        assert output.content is not None, "released twice"
        self.log.append(("release", output.content))
        output.content = None


class Link:
    """Messages from one rank to another: a receive is for the next of them when it is issued."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.issued = 0
        self.changed = threading.Condition()

    def put(self, content: Any) -> None:
        with self.changed:
            self.sent.append(content)
            self.changed.notify_all()

    def receive(self) -> Callable[[], Any]:
        number = self.issued
        self.issued += 1

        def wait() -> Any:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.sent) > number, TIMEOUT)
                return self.sent[number]

        return wait


class Transport:
    """Messages between threads; `is_async`: a call returns at once, and only its wait brings what is received."""

    def __init__(self, links: dict[tuple[int, int], Link], rank: int, ranks: int, is_async: bool) -> None:
        self.links, self.rank, self.is_async = links, rank, is_async
        self.ahead, self.behind = (rank + 1) % ranks, (rank - 1) % ranks
        self.unfinished: list[Value] = []

    def _send(self, tensor: Value | None, target: int) -> None:
        if tensor is not None:
            assert tensor.content is not None, "sent after it was released"
            self.links[self.rank, target].put(tensor.content)

    def exchange(
        self, to_next: Value | None, to_prev: Value | None, from_prev: bool, from_next: bool
    ) -> tuple[Any, ...]:
        self._send(to_next, self.ahead)
        self._send(to_prev, self.behind)
        got = [Value(None) if wanted else None for wanted in (from_prev, from_next)]
        links = [self.links[source, self.rank] for source in (self.behind, self.ahead)]
        waits = [(value, link.receive()) for value, link in zip(got, links, strict=True) if value is not None]
        sent = [each for each in (to_next, to_prev) if each is not None]

        def receive() -> None:
            for value, wait in waits:
                value.content = wait()

        def finish() -> None:
            for each in sent:
                assert each.content is not None, "released before the call that sends it has ended"
                self.unfinished.remove(each)

        if not self.is_async:
            receive()
            return tuple(got)
        self.unfinished += sent
        return (*got, receive if waits else None, finish if sent else None)


def executed(
    schedule: Schedule, is_async: bool, keep: bool = True, traces: Path | None = None, pairs: bool = False
) -> list[Passes]:
    """Run all ranks, each in a thread; raises what one of them raises."""
    ranks = range(schedule.num_ranks)
    links = {(one, other): Link() for one in ranks for other in ranks}
    found = [Passes(schedule, rank) for rank in ranks]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            compiled = compile_program(schedule, rank, int(is_async), "one way" if is_async else "all", pairs)
            transport = Transport(links, rank, len(ranks), is_async)
            record = Trace(rank, traces / f"rank{rank}.jsonl") if traces is not None else None
            Executor(compiled, found[rank], transport, keep, record).run()
            assert not transport.unfinished
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    if errors:
        raise errors[0]
    return found


SCHEDULES = [
    orders.build("1f1b", PipelineShape(3, 5)),
    orders.build("interleaved", PipelineShape(2, 4, 3)),
    orders.build("interleaved", PipelineShape(2, 5, 2, 3)),
    orders.build("interleaved-overlap", PipelineShape(2, 4, 2)),
    orders.build("zb-h1", PipelineShape(3, 5)),
    orders.build("dualpipev", PipelineShape(2, 5, 2)),
    orders.build("dualpipev-dw-detach", PipelineShape(3, 6, 2)),
    recompute_plan.in_advance(orders.build("interleaved", PipelineShape(2, 4, 2))),
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.name}-{each.num_ranks}")
def test_each_step_is_given_what_its_neighbour_made(
    schedule: Schedule, is_async: bool, pairs: bool, tmp_path: Path
) -> None:
    ranks = executed(schedule, is_async, traces=tmp_path, pairs=pairs)
    for rank, passes in enumerate(ranks):
        overlapped = sum(isinstance(entry, OverlappedPair) for entry in schedule.ranks[rank])
        assert passes.pairs == (overlapped if pairs else 0)
        steps = [step for name, step in passes.log if name == "step"]
        assert steps == list(schedule.steps(rank))
        released = [content for name, content in passes.log if name == "release"]
        outputs = [step for step in steps if step.kind is Kind.FORWARD]
        last = schedule.num_stages - 1
        assert len(released) == sum(schedule.stage(rank, step.chunk) != last for step in outputs)
    (recorded,) = trace.training_steps(trace.read(tmp_path), schedule)
    assert recorded.makespan > 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["forward-only", "forward-only-v"])
def test_an_evaluation_releases_nothing(name: str, is_async: bool) -> None:
    schedule = orders.build(name, PipelineShape(2, 3, 2))
    for rank, passes in enumerate(executed(schedule, is_async, keep=False)):
        assert [each for _, each in passes.log] == list(schedule.steps(rank))


def test_a_trace_has_a_line_for_every_step_and_is_appended_to(tmp_path: Path) -> None:
    record = Trace(3, tmp_path / "trace")
    for microbatch in range(2):
        record.done.append((Step(Kind.INPUT_GRAD, 1, microbatch), 0.5, 0.75))
        record.write()
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert lines[1] == {"rank": 3, "kind": "BI", "chunk": 1, "microbatch": 1, "begin": 0.5, "end": 0.75}
    assert len(lines) == 2 and record.done == []


def test_nothing_is_held_once_its_last_step_has_run() -> None:
    """What a program still holds when its last pass runs is that pass's own."""
    alive: weakref.WeakSet[Value] = weakref.WeakSet()

    class Counting(Passes):
        def weight_grad(self, chunk: int) -> Callable[[int], None]:
            def weight_grad(microbatch: int) -> None:
                if microbatch == 4:
                    gc.collect()
                    left.append(len(alive))

            return weight_grad

        def forward(self, chunk: int) -> Callable[[int, Value | None], Value]:
            made = super().forward(chunk)

            def forward(microbatch: int, received: Value | None) -> Value:
                found = made(microbatch, received)
                alive.add(found)
                return found

            return forward

    left: list[int] = []
    schedule = orders.build("zb-h1", PipelineShape(1, 5))
    Executor(compile_program(schedule, 0), Counting(schedule, 0), Transport({}, 0, 1, False)).run()
    assert left == [0]
