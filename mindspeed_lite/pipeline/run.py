"""Executes the program of a rank: its steps in order, each with the tensors it needs, and the messages between them.

What a forward or backward pass is, and how tensors travel, is passed in. A tensor that arrives is waited for by the
step that takes it. One that leaves is waited for after the next call that sends; then its storage may be released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .program import RankProgram
from .steps import Kind, Step

Wait = Callable[[], object]
Hook = Callable[[], object]


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


# What a call brought from the previous and from the next rank, and what to wait for where it has only begun: for what
# it brought, and for what it sent.
Exchanged = tuple[Any, Any, Wait | None, Wait | None]


class Transport(Protocol):
    """How tensors travel between neighbours."""

    def exchange(self, to_next: Any, to_prev: Any, from_prev: bool, from_next: bool) -> Exchanged:
        """Send what is not None and receive where asked to, all at once. Where it has only begun, it goes one way."""


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


def run(
    program: RankProgram,
    passes: Passes,
    transport: Transport,
    keep: bool = True,
    trace: Trace | None = None,
    before: Mapping[int, Hook] = {},
    after: Mapping[int, Hook] = {},
) -> None:
    """Execute a program.

    keep: hold inputs and outputs for backward passes, and release outputs once they are sent.
    before, after: what to call before and after the step at a place of the program.
    """
    instructions = program.instructions
    tensors: list[Any] = [None] * (2 * len(instructions))
    kept: list[Any] = [None] * len(instructions)
    waits: dict[int, Wait] = {}
    sending: tuple[Wait | None, Sequence[Any]] = (None, ())
    exchange, release = transport.exchange, passes.release

    def finish() -> None:
        """Wait for the last call that sends, and release what it has sent."""
        nonlocal sending
        wait, outputs = sending
        sending = (None, ())
        if wait is not None:
            wait()
        if keep:
            for output in outputs:
                release(output)

    for index, (calls, kind, step, unit, takes, gives) in enumerate(instructions):
        for to_next, to_prev, from_prev, from_next, outputs in calls:
            ahead = behind = None
            if to_next >= 0:
                ahead = tensors[to_next]
            if to_prev >= 0:
                behind = tensors[to_prev]
            got_prev, got_next, received, sent = exchange(ahead, behind, from_prev >= 0, from_next >= 0)
            if from_prev >= 0:
                tensors[from_prev] = got_prev
            if from_next >= 0:
                tensors[from_next] = got_next
            if received is not None:
                waits[from_prev if from_prev >= 0 else from_next] = received
            if to_next >= 0 or to_prev >= 0:
                if sending[0] is not None:
                    finish()
                if sent is not None:
                    sending = (sent, [tensors[place] for place in outputs])
                elif keep:
                    for place in outputs:
                        release(tensors[place])
                tensors[to_next if to_next >= 0 else to_prev] = tensors[to_prev if to_prev >= 0 else to_next] = None
        if step is None:
            break
        if index in before:
            before[index]()
        tensor = made = None
        if takes >= 0:
            tensor, tensors[takes] = tensors[takes], None
            if takes in waits:
                waits.pop(takes)()
        begin = time.perf_counter() if trace is not None else 0.0
        if kind is Kind.FORWARD:
            made = passes.forward(step, tensor)
            if keep:
                kept[unit] = (tensor, made)
        elif kind is Kind.WEIGHT_GRAD:
            passes.weight_grad(step)
        elif kind is Kind.RECOMPUTE:
            tensor, _ = kept[unit]
            kept[unit] = (tensor, passes.recompute(step, tensor))
        else:
            tensor_in, output = kept[unit]
            kept[unit] = None
            if sending[0] is not None and any(each is output for each in sending[1]):
                finish()
            made = passes.backward(step, tensor_in, output, tensor)
            tensor_in = output = None
        if trace is not None:
            trace.done.append((step, begin, time.perf_counter()))
        if index in after:
            after[index]()
        if gives >= 0:
            tensors[gives] = made
        elif gives < -1:
            tensors[-2 - gives] = passes.hand_over(made) if kind is Kind.FORWARD else made
            if keep and kind is Kind.FORWARD:
                release(made)
    finish()
