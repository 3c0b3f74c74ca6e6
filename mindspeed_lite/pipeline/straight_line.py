"""Writes the program of a rank out as a Python function: a line for each pass and for each call that carries messages.

The order of a rank is known before it runs, so nothing is left to decide then: which tensor a pass takes, which message
a call sends, what is waited for, and when a tensor is let go. A loop over steps would look all of it up for each pass.

    t0, _ = exchange(None, None, True, False)
    o0 = forward0(0, t0)
    _, t1 = exchange(o0, None, False, True)
    d0 = backward0(0, t0, o0, t1)
    t0 = o0 = t1 = None

`forward0` is the forward pass of model chunk 0, and its first argument the micro-batch. `run` binds the names.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

from .program import BoundStep, RankProgram, Transfer, pair_name, pass_name
from .steps import BACKWARDS, Kind, Message, Payload, Step

NONE = "None"


class ExecutionForm(NamedTuple):
    """How a program is executed.

    keep: inputs and outputs are held for backward passes. releases: an output that has been sent is released.
    is_async: calls only begin, and return what to wait for. is_traced: each pass is timed.
    before, after: places of steps that have a hook.
    """

    keep: bool
    releases: bool
    is_async: bool
    is_traced: bool
    before: frozenset[int]
    after: frozenset[int]


def function(program: RankProgram, form: ExecutionForm) -> Callable[..., None]:
    """Return the function of a program; its parameters are what `run` hands over, in that order."""
    found: Callable[..., None] | None = program.functions.get(form)
    if found is None:
        namespace: dict[str, Any] = {}
        exec(compile(source(program, form), "<pipeline schedule>", "exec"), namespace)
        found = program.functions[form] = namespace["run_rank"]
    return found


def source(program: RankProgram, form: ExecutionForm) -> str:
    """Return the text of that function."""
    given = ("exchange", "hand_over", "release", "before", "after", "record", "now", "steps", *program.passes)
    lines = [*_Writer(program, form).lines()] or ["pass"]
    return "\n".join((f"def run_rank({', '.join(given)}):", *(f"    {line}" for line in lines)))


class _Writer:
    """Writes the lines of one program.

    names: message -> the variable that holds its tensor. waits: message -> the one that waits for its arrival.
    held: (chunk, micro-batch) -> the variables of input and output that its backward takes.
    sending: the variable that waits for the last call that sends, and the messages of that call.
    """

    def __init__(self, program: RankProgram, form: ExecutionForm) -> None:
        self.program, self.form = program, form
        self.names: dict[Message, str] = {}
        self.waits: dict[Message, str] = {}
        self.held: dict[tuple[int, int], tuple[str, str]] = {}
        self.sending: tuple[str, list[Message]] | None = None
        self.count = 0

    def lines(self) -> Iterator[str]:
        works, paired = self.program.works, self.program.paired
        for place, work in enumerate(works):
            for transfer in self.program.transfers[place]:
                yield from self._transfer(transfer)
            if place in paired:
                yield from self._pair(place, work, works[place + 1])
            elif place - 1 not in paired:
                yield from self._step(place, work)
        for transfer in self.program.transfers[-1]:
            yield from self._transfer(transfer)
        yield from self._finish()

    def _new(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _transfer(self, transfer: Transfer) -> Iterator[str]:
        sent = [each for each in transfer[:2] if each is not None]
        ahead, behind = (NONE if each is None else self.names[each] for each in transfer[:2])
        targets = []
        for each in transfer[2:]:
            if each is not None:
                self.names[each] = self._new("t")
            targets.append("_" if each is None else self.names[each])
        got = [each for each in transfer[2:] if each is not None]
        call = f"exchange({ahead}, {behind}, {transfer.from_prev is not None}, {transfer.from_next is not None})"
        if not self.form.is_async:
            yield f"{', '.join(targets)} = {call}" if got else call
            yield from self._sent(sent)
            return
        received, done = self._new("w") if got else "_", self._new("w") if sent else "_"
        yield f"{', '.join(targets)}, {received}, {done} = {call}"
        for each in got:
            self.waits[each] = received
        if sent:
            yield from self._finish()
            self.sending = done, sent

    def _finish(self) -> Iterator[str]:
        """Wait for the last call that sends."""
        if self.sending is not None:
            (done, sent), self.sending = self.sending, None
            yield from self._wait(done)
            yield from self._sent(sent)

    def _wait(self, name: str) -> Iterator[str]:
        """Wait, and let go of what the handle holds."""
        yield f"if {name} is not None: {name}()"
        yield f"{name} = None"

    def _sent(self, messages: Iterable[Message]) -> Iterator[str]:
        """Let go what has been sent. An output whose backward is to come is released: its graph stays."""
        for each in messages:
            name = self.names.pop(each)
            if each.payload is Payload.GRADIENT or not self.form.keep:
                yield f"{name} = None"
            elif self.form.releases:
                yield f"release({name})"

    def _step(self, place: int, work: BoundStep) -> Iterator[str]:
        kind, chunk, microbatch = work.step
        taken = self._taken(work)
        yield from self._begin(place, work)
        made, arguments, done_with = "", f"{microbatch}", [taken]
        if kind is Kind.FORWARD:
            made, arguments = self._new("o"), f"{microbatch}, {taken}"
            if self.form.keep:
                self.held[chunk, microbatch], done_with = (taken, made), []
            elif work.gives is None:
                made = ""
        elif kind in BACKWARDS:
            received, output = yield from self._of_forward(work.step)
            made = "" if work.gives is None else self._new("d")
            arguments = f"{microbatch}, {received}, {output}, {taken}"
            done_with = [received, output, taken]
        call = f"{pass_name(work.step)}({arguments})"
        yield from self._timed(f"{made} = {call}" if made else call, place)
        yield from self._let_go(done_with)
        yield from self._end(place, work, made)

    def _pair(self, place: int, ahead: BoundStep, back: BoundStep) -> Iterator[str]:
        """One call runs both passes and returns the output and the gradient."""
        taken, gradient = self._taken(ahead), self._taken(back)
        yield from self._begin(place, ahead)
        yield from self._begin(place + 1, back)
        received, output = yield from self._of_forward(back.step)
        made, found = self._new("o"), "_" if back.gives is None else self._new("d")
        self.held[ahead.step[1:]] = taken, made
        arguments = f"{ahead.step.microbatch}, {taken}, {back.step.microbatch}, {received}, {output}, {gradient}"
        call = f"{pair_name(ahead.step.chunk, back.step.chunk)}({arguments})"
        yield from self._timed(f"{made}, {found} = {call}", place, place + 1)
        yield from self._let_go([received, output, gradient])
        yield from self._end(place, ahead, made)
        yield from self._end(place + 1, back, found)

    def _taken(self, work: BoundStep) -> str:
        return NONE if work.takes is None else self.names.pop(work.takes)

    def _begin(self, place: int, work: BoundStep) -> Iterator[str]:
        if place in self.form.before:
            yield f"before[{place}]()"
        if work.takes in self.waits:
            yield from self._wait(self.waits.pop(work.takes))

    def _of_forward(self, step: Step) -> Generator[str, None, tuple[str, str]]:
        """The input and output of a backward's forward, once the output has been sent."""
        received, output = self.held.pop(step[1:])
        if self.sending is not None and any(self.names[each] == output for each in self.sending[1]):
            yield from self._finish()
        return received, output

    def _timed(self, line: str, *places: int) -> Iterator[str]:
        if self.form.is_traced:
            yield "begin = now()"
        yield line
        if self.form.is_traced:
            yield "end = now()"
            for place in places:
                yield f"record((steps[{place}], begin, end))"

    def _let_go(self, names: Iterable[str]) -> Iterator[str]:
        free = [name for name in names if name != NONE]
        if free:
            yield f"{' = '.join(free)} = None"

    def _end(self, place: int, work: BoundStep, made: str) -> Iterator[str]:
        if place in self.form.after:
            yield f"after[{place}]()"
        if work.gives is not None:
            yield from self._give(work.gives, made)

    def _give(self, message: Message, made: str) -> Iterator[str]:
        if message.source != message.target or message.payload is Payload.GRADIENT:
            self.names[message] = made
            return
        self.names[message] = self._new("t")
        yield f"{self.names[message]} = hand_over({made})"
        if self.form.keep and self.form.releases:
            yield f"release({made})"
        elif not self.form.keep:
            yield f"{made} = None"
