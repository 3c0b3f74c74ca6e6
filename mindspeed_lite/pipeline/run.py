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
from .program import PassWork, Program, Transfer
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


@dataclass
class Executor:
    """Executes a rank's program once.

    keep: hold inputs and outputs for backward passes, and release sent outputs.
    tensors: message -> tensor. waits: message -> waits for its arrival.
    held: (chunk, micro-batch) -> (input, output) for its backward.
    sending: messages of the last send, and its wait.
    """

    program: Program
    passes: Passes
    transport: Transport
    keep: bool = True
    trace: Trace | None = None
    sync: DataParallelSync | None = None
    tensors: dict[Message | None, Any] = field(default_factory=dict)
    waits: dict[Message | None, Callable[[], object] | None] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)
    sending: tuple[list[Message], Callable[[], object] | None] = ([], None)

    def run(self) -> None:
        # Bound once for all micro-batches.
        passed = dict.fromkeys(_passed(action) for action in self.program if isinstance(action, PassWork))
        calls = {each: self._bound(*each) for each in passed}
        if self.sync is not None:
            self.sync.begin()
        for action in self.program:
            if isinstance(action, Transfer):
                self.exchange(action)
            else:
                self.compute(action, calls[_passed(action)])
        self.finish_sending()
        if self.sync is not None:
            self.sync.end()
        if self.trace is not None:
            self.trace.write()

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
            if self.keep and self.passes.releases and message.step.kind is Kind.FORWARD:
                self.passes.release(tensor)

    def compute(self, work: PassWork, call: Callable[..., Any]) -> None:
        for step, message in zip(work.steps, work.takes, strict=True):
            if self.sync is not None:
                self.sync.before(step)
            wait = self.waits.pop(message, None)
            if wait is not None:
                wait()
        arguments: list[Any] = []
        for step, message in zip(work.steps, work.takes, strict=True):
            arguments.append(step.microbatch)
            if step.kind in BACKWARDS:
                arguments += self._of_forward(step)
            if step.kind is Kind.FORWARD or step.kind in BACKWARDS:
                arguments.append(self.tensors.pop(message, None))
        begin = time.perf_counter()
        made = call(*arguments)
        if self.trace is not None:
            end = time.perf_counter()
            self.trace.done += [(step, begin, end) for step in work.steps]
        outputs = made if len(work.steps) > 1 else (made,)
        if self.keep and work.steps[0].kind is Kind.FORWARD:
            self.held[work.steps[0][1:]] = arguments[1], outputs[0]
        arguments.clear()
        for step, message, output in zip(work.steps, work.gives, outputs, strict=True):
            self._end(step, message, output)

    def _bound(self, *passed: tuple[Kind, int]) -> Callable[..., Any]:
        name = "pair" if len(passed) > 1 else passed[0][0].name.lower()
        found: Callable[..., Any] = getattr(self.passes, name)(*(chunk for _, chunk in passed))
        return found

    def _of_forward(self, step: Step) -> tuple[Any, Any]:
        """Tensors of a backward's forward, after the output was sent."""
        received, output = self.held.pop(step[1:])
        if any(self.tensors[message] is output for message in self.sending[0]):
            self.finish_sending()
        return received, output

    def _end(self, step: Step, message: Message | None, made: Any) -> None:
        if self.sync is not None:
            self.sync.after(step)
        if message is None:
            return
        if message.is_local and step.kind is Kind.FORWARD:
            self.tensors[message] = self.passes.hand_over(made)
            if self.keep and self.passes.releases:
                self.passes.release(made)
        else:
            self.tensors[message] = made


def _passed(work: PassWork) -> tuple[tuple[Kind, int], ...]:
    return tuple(step[:2] for step in work.steps)
