"""Executes a rank's program.

The consuming step waits for a tensor. A send is waited for after the next one; then its storage may be released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .data_parallel_sync import DataParallelSync
from .program import RankProgram, Transfer
from .steps import BACKWARDS, Kind, Message, Step


class Passes(Protocol):
    """Computations of a rank: the method of a `Kind`'s name returns a function for one model chunk.

    Tensors are whatever `Transport` carries, or None.

    Programs with pairs also need `pair(ahead, back)`, a function of (micro-batch, input, other micro-batch, its input,
    output, output gradient). It runs the forward of chunk `ahead` and the other's backward of chunk `back`, and returns
    output and gradient.
    """

    @property
    def releases(self) -> bool: ...

    def forward(self, chunk: int) -> Callable[[int, Any], Any]:
        """(micro-batch, input) -> output; input is None at the model's first stage."""

    def recompute(self, chunk: int) -> Callable[[int], object]:
        """(micro-batch): recompute activations."""

    def backward(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        """(micro-batch, input, output, output gradient) -> input gradient."""

    def input_grad(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        """The same, with deferred weight gradients."""

    def weight_grad(self, chunk: int) -> Callable[[int], object]:
        """(micro-batch): compute deferred gradients."""

    def hand_over(self, output: Any) -> Any:
        """Output as the next stage's input on this rank."""

    def release(self, output: Any) -> None:
        """Free a sent output's storage, keeping its graph."""


class Transport(Protocol):
    """Communication between neighbours.

    `exchange(to_next, to_prev, from_prev, from_next)` sends what is not None, receives where True, and returns what
    came from the previous and the next rank. With `is_async` it starts one direction and adds two functions, or None,
    to wait for receive and send.
    """

    @property
    def is_async(self) -> bool: ...

    @property
    def exchange(self) -> Callable[[Any, Any, bool, bool], tuple[Any, ...]]: ...


@dataclass
class Trace:
    """Records executed steps as JSON lines for `trace.read`."""

    rank: int
    path: Path
    done: list[tuple[Step, float, float]] = field(default_factory=list)

    def write(self) -> None:
        with self.path.open("a") as file:
            for (kind, chunk, microbatch), begin, end in self.done:
                line = {"rank": self.rank, "kind": kind.value, "chunk": chunk, "microbatch": microbatch}
                file.write(json.dumps({**line, "begin": begin, "end": end}) + "\n")
        self.done.clear()


def run(
    program: RankProgram,
    passes: Passes,
    transport: Transport,
    keep: bool = True,
    trace: Trace | None = None,
    sync: DataParallelSync | None = None,
) -> None:
    """Execute a program.

    keep: hold inputs and outputs for backward passes, and release sent outputs.
    """
    executor = _Executor(program, passes, transport, keep, trace, sync)
    if sync is not None:
        sync.begin()
    for place, transfers in enumerate(program.transfers):
        for transfer in transfers:
            executor.exchange(transfer)
        if place in program.paired:
            executor.run_pair(place)
        elif place < len(program.works) and place - 1 not in program.paired:
            executor.run_step(place)
    executor.finish_sending()
    if sync is not None:
        sync.end()
    if trace is not None:
        trace.write()


class _Executor:
    """Tensors of one run.

    tensors: message -> tensor. waits: message -> waits for its arrival.
    held: (chunk, micro-batch) -> (input, output) for its backward.
    sending: messages of the last send, and its wait.
    """

    def __init__(
        self,
        program: RankProgram,
        passes: Passes,
        transport: Transport,
        keep: bool,
        trace: Trace | None,
        sync: DataParallelSync | None,
    ) -> None:
        self.works, self.passes, self.transport = program.works, passes, transport
        self.keep, self.releases = keep, keep and passes.releases
        self.trace, self.sync = trace, sync
        self.pass_of = {
            (kind, chunk): getattr(passes, kind.name.lower())(chunk)
            for kind, chunk in dict.fromkeys(step[:2] for step in program.steps)
        }
        pairs = dict.fromkeys((program.steps[i].chunk, program.steps[i + 1].chunk) for i in sorted(program.paired))
        self.pair_of = {chunks: getattr(passes, "pair")(*chunks) for chunks in pairs}  # noqa: B009
        self.tensors: dict[Message | None, Any] = {}
        self.waits: dict[Message | None, Callable[[], object] | None] = {}
        self.held: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.sending: tuple[list[Message], Callable[[], object] | None] = [], None

    def exchange(self, transfer: Transfer) -> None:
        to_next, to_prev, from_prev, from_next = transfer
        sent = [message for message in (to_next, to_prev) if message is not None]
        arrived = self.transport.exchange(
            self.tensors.get(to_next), self.tensors.get(to_prev), from_prev is not None, from_next is not None
        )
        self.tensors |= {each: tensor for each, tensor in zip((from_prev, from_next), arrived, strict=False) if each}
        if not self.transport.is_async:
            self._let_go(sent)
            return
        self.waits |= {each: arrived[2] for each in (from_prev, from_next) if each}
        if sent:
            self.finish_sending()
            self.sending = sent, arrived[3]

    def finish_sending(self) -> None:
        (sent, wait), self.sending = self.sending, ([], None)
        if wait is not None:
            wait()
        self._let_go(sent)

    def _let_go(self, sent: Sequence[Message]) -> None:
        """Outputs needed by a backward are released, keeping their graph."""
        for message in sent:
            tensor = self.tensors.pop(message)
            if self.releases and message.step.kind is Kind.FORWARD:
                self.passes.release(tensor)

    def run_step(self, place: int) -> None:
        step = self.works[place].step
        run = self.pass_of[step[:2]]
        self._begin(place)
        if step.kind is Kind.FORWARD:
            taken = self._take(place)
            made = self._timed((step,), run, step.microbatch, taken)
            if self.keep:
                self.held[step[1:]] = taken, made
            del taken
        elif step.kind in BACKWARDS:
            made = self._timed((step,), run, step.microbatch, *self._of_forward(step), self._take(place))
        else:
            made = self._timed((step,), run, step.microbatch)
        self._end(place, made)

    def run_pair(self, place: int) -> None:
        steps = ahead, back = self.works[place].step, self.works[place + 1].step
        run = self.pair_of[ahead.chunk, back.chunk]
        self._begin(place)
        self._begin(place + 1)
        taken = self._take(place)
        of_backward = back.microbatch, *self._of_forward(back), self._take(place + 1)
        made, gradient = self._timed(steps, run, ahead.microbatch, taken, *of_backward)
        self.held[ahead[1:]] = taken, made
        del taken, of_backward
        self._end(place, made)
        self._end(place + 1, gradient)

    def _begin(self, place: int) -> None:
        if self.sync is not None:
            self.sync.before(self.works[place].step)
        wait = self.waits.pop(self.works[place].takes, None)
        if wait is not None:
            wait()

    def _take(self, place: int) -> Any:
        return self.tensors.pop(self.works[place].takes, None)

    def _of_forward(self, step: Step) -> tuple[Any, Any]:
        """Tensors of a backward's forward, after the output was sent."""
        received, output = self.held.pop(step[1:])
        if any(self.tensors[message] is output for message in self.sending[0]):
            self.finish_sending()
        return received, output

    def _timed(self, steps: Sequence[Step], run: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        made = run(*arguments)
        if self.trace is not None:
            end = time.perf_counter()
            self.trace.done += [(step, begin, end) for step in steps]
        return made

    def _end(self, place: int, made: Any) -> None:
        if self.sync is not None:
            self.sync.after(self.works[place].step)
        message = self.works[place].gives
        if message is None:
            return
        if message.is_local and message.step.kind is Kind.FORWARD:
            self.tensors[message] = self.passes.hand_over(made)
            if self.releases:
                self.passes.release(made)
        else:
            self.tensors[message] = made
