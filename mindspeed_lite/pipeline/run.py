"""Executes the program of a rank: its steps in order, each with the tensors it needs, and the messages between them.

What a forward or backward pass is, and how tensors travel, is passed in. A tensor that arrives is waited for by the
step that takes it. One that leaves is waited for after the next call that sends; then its storage may be released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .program import Program, Transfer
from .steps import Kind, Message, Payload, Step

Wait = Callable[[], object]


class Passes(Protocol):
    """The computations of a rank. Tensors are whatever `Transport` carries; None stands for none."""

    def forward(self, step: Step, received: Any) -> Any:
        """Return the chunk's output for its input, None at the first stage of the model."""

    def recompute(self, step: Step, received: Any) -> Any:
        """Return the output once more, with everything that the backward pass needs."""

    def backward(self, step: Step, received: Any, output: Any, gradient: Any) -> Any:
        """Return the gradient of the input; an INPUT_GRAD step leaves weight gradients for later."""

    def weight_grad(self, step: Step) -> None:
        """Compute what the INPUT_GRAD step of the same chunk and micro-batch has left."""

    def hand_over(self, output: Any) -> Any:
        """Return an output as the input of the next stage, which is on this rank."""

    def release(self, output: Any) -> None:
        """Free the storage of an output that has been sent; its graph stays."""


class Exchanged(NamedTuple):
    """What a call brought, and what to wait for where it has only begun."""

    from_prev: Any = None
    from_next: Any = None
    received: Wait | None = None
    sent: Wait | None = None


class Transport(Protocol):
    """How tensors travel between neighbours."""

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> Exchanged:
        """Send what is not None and receive where asked to, all at once."""


@dataclass
class Trace:
    """What a rank has executed, written as JSON lines: rank, kind, chunk, microbatch, begin, end (seconds)."""

    rank: int
    path: Path
    done: list[tuple[Step, float, float]] = field(default_factory=list)

    def write(self) -> None:
        """Append what was recorded since the last call."""
        with self.path.open("a") as file:
            for (kind, chunk, microbatch), begin, end in self.done:
                line = {"rank": self.rank, "kind": kind.value, "chunk": chunk, "microbatch": microbatch}
                file.write(json.dumps({**line, "begin": begin, "end": end}) + "\n")
        self.done.clear()


def run(program: Program, passes: Passes, transport: Transport, keep: bool = True, trace: Trace | None = None) -> None:
    """Execute a program.

    keep: hold inputs and outputs for backward passes, and release outputs once they are sent.
    """
    arrived: dict[Message, tuple[Any, Wait | None]] = {}
    leaving: dict[Message, Any] = {}
    kept: dict[tuple[int, int], tuple[Any, Any]] = {}
    sending: tuple[Wait | None, Sequence[Any]] = (None, ())

    def call(transfer: Transfer) -> None:
        nonlocal sending
        sends = [(each, leaving.pop(each)) if each is not None else (None, None) for each in transfer[:2]]
        done = transport.exchange(
            sends[0][1], sends[1][1], transfer.from_prev is not None, transfer.from_next is not None
        )
        if transfer.from_prev is not None:
            arrived[transfer.from_prev] = (done.from_prev, done.received)
        if transfer.from_next is not None:
            arrived[transfer.from_next] = (done.from_next, done.received)
        if transfer.to_next is not None or transfer.to_prev is not None:
            finish()
            outputs = [tensor for message, tensor in sends if message and message.payload is Payload.ACTIVATION]
            sending = (done.sent, outputs)
            if done.sent is None:
                finish()

    def finish() -> None:
        nonlocal sending
        wait, outputs = sending
        if wait is not None:
            wait()
        if keep:
            for output in outputs:
                passes.release(output)
        sending = (None, ())

    for index, (step, takes, gives) in enumerate(program.works):
        for transfer in program.transfers[index]:
            call(transfer)
        tensor = made = None
        if takes is not None:
            tensor, wait = arrived.pop(takes)
            if wait is not None:
                wait()
        begin = time.perf_counter() if trace is not None else 0.0
        kind, where = step.kind, (step.chunk, step.microbatch)
        if kind is Kind.FORWARD:
            made = passes.forward(step, tensor)
            if keep:
                kept[where] = (tensor, made)
        elif kind is Kind.WEIGHT_GRAD:
            passes.weight_grad(step)
        elif kind is Kind.RECOMPUTE:
            tensor, _ = kept[where]
            kept[where] = (tensor, passes.recompute(step, tensor))
        else:
            received, output = kept.pop(where)
            if any(each is output for each in sending[1]):
                finish()
            made = passes.backward(step, received, output, tensor)
            received = output = None
        if trace is not None:
            trace.done.append((step, begin, time.perf_counter()))
        if gives is None:
            continue
        if gives.source != gives.target:
            leaving[gives] = made
        elif gives.payload is Payload.GRADIENT:
            arrived[gives] = (made, None)
        else:
            arrived[gives] = (passes.hand_over(made), None)
            if keep:
                passes.release(made)
    for transfer in program.transfers[-1]:
        call(transfer)
    finish()
