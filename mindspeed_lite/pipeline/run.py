"""Executes the program of a rank: its steps in order, each with the tensors it needs, and the messages between them.

What a forward or backward pass is, and how tensors travel, is passed in. A tensor that arrives is waited for by the
step that takes it. One that leaves is waited for after the next call that sends; then its storage may be released.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import straight_line
from .program import RankProgram
from .steps import Step

Hook = Callable[[], object]


class Passes(Protocol):
    """The computations of a rank: each method returns the pass of one model chunk, which is then called as shown.

    Tensors are whatever `Transport` carries; None stands for none. releases: whether `release` does something.
    """

    @property
    def releases(self) -> bool: ...

    def forward(self, chunk: int) -> Callable[[int, Any], Any]:
        """(micro-batch, input): the chunk's output. The input is None at the first stage of the model."""

    def recompute(self, chunk: int) -> Callable[[int], object]:
        """(micro-batch): bring back what its forward has not kept."""

    def backward(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        """(micro-batch, input, output, gradient of the output): the gradient of the input."""

    def input_grad(self, chunk: int) -> Callable[[int, Any, Any, Any], Any]:
        """Return the same, with the weight gradients left for later."""

    def weight_grad(self, chunk: int) -> Callable[[int], object]:
        """(micro-batch): compute what its `input_grad` has left."""

    def hand_over(self, output: Any) -> Any:
        """Return an output as the input of the next stage, which is on this rank."""

    def release(self, output: Any) -> None:
        """Free the storage of an output that has been sent; its graph stays."""


class PairedPasses(Passes, Protocol):
    """What a program with pairs in one call needs besides."""

    def pair(self, ahead: int, back: int) -> Callable[[int, Any, int, Any, Any, Any], tuple[Any, Any]]:
        """(micro-batch, input, another micro-batch, its input, output, gradient of it): output and gradient.

        They are the forward of chunk `ahead` for the first and the backward of chunk `back` for the second.
        """


class Transport(Protocol):
    """How tensors travel between neighbours.

    `exchange(to_next, to_prev, from_prev, from_next)` sends what is not None and receives where asked to, all at once.
    It returns what came from the previous and from the next rank. is_async: it only begins, moves tensors one way, and
    returns two more: functions that wait for what it brings and for what it sends, or None.
    """

    @property
    def is_async(self) -> bool: ...

    @property
    def exchange(self) -> Callable[[Any, Any, bool, bool], tuple[Any, ...]]: ...


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
    form = straight_line.ExecutionForm(
        keep, passes.releases, transport.is_async, trace is not None, frozenset(before), frozenset(after)
    )
    straight_line.function(program, form)(
        transport.exchange,
        passes.hand_over,
        passes.release,
        before,
        after,
        None if trace is None else trace.done.append,
        time.perf_counter,
        program.steps,
        *[getattr(passes, method)(*chunks) for method, chunks in program.passes.values()],
    )
