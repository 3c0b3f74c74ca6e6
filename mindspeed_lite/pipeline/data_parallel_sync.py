"""Schedules gradient reductions and parameter gathers through Megatron's sync functions.

A chunk's gradients are complete after its last contributing step; parameters are gathered one chunk ahead. See
`no_sync_func`, `grad_sync_func` and `param_sync_func`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .steps import BACKWARDS, Kind, Step


@dataclass(frozen=True)
class SyncPlan:
    """Steps of a rank that start communication.

    last_backward, complete: chunk -> its last backward, and the step that completes its gradients.
    reduced: step -> chunk to reduce after it.
    gathered: forward step -> chunk to gather before it.
    """

    chunks: int
    last_backward: Mapping[int, Step]
    complete: Mapping[int, Step]
    reduced: Mapping[Step, int]
    gathered: Mapping[Step, int]


def sync_plan(steps: Sequence[Step], chunks: int, rank: int) -> SyncPlan:
    """Plan of a rank.

    A reduction starts `rank` steps after its chunk is complete, a gather as many steps earlier: as in Megatron, ranks
    then start together.
    """
    adding = [step for step in steps if step.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
    complete = {step.chunk: step for step in adding}
    forwards = [step for step in steps if step.kind is Kind.FORWARD]
    gathered = {
        forwards[index - rank]: step.chunk + 1
        for index, step in enumerate(forwards)
        if step.microbatch == 0 and 1 < step.chunk + 1 < chunks and index >= rank
    }
    last_backward = {step.chunk: step for step in steps if step.kind in BACKWARDS}
    later = zip(adding, adding[rank:], strict=False)
    reduced = {after: step.chunk for step, after in later if complete[step.chunk] == step}
    return SyncPlan(chunks, last_backward, complete, reduced, gathered)


class DataParallelSync:
    def __init__(self, config: Any, models: Sequence[Any], plan: SyncPlan, is_first_stage: bool) -> None:
        self._models, self._plan = models, plan
        self._no_sync = _listed(config.no_sync_func, 1)
        self._reduce = _listed(config.grad_sync_func, plan.chunks)
        self._gather = _listed(config.param_sync_func, plan.chunks) if plan.chunks > 1 else []
        # Gradients reduce themselves without a function, and on the first rank with one chunk: it has no final
        # bubble.
        self._starts_itself = not self._reduce or (plan.chunks == 1 and is_first_stage)
        self._closing = {*plan.last_backward.values(), *plan.complete.values()} if self._starts_itself else set()
        self._reduced: set[int] = set()
        self._held_back = contextlib.ExitStack()

    @staticmethod
    def is_asked_for(config: Any) -> bool:
        return any((config.no_sync_func, config.grad_sync_func, config.param_sync_func))

    def begin(self) -> None:
        """Hold back reductions, and gather for the first forwards."""
        self._hold_back()
        for chunk in range(min(2, len(self._gather))):
            self._gather[chunk](self._models[chunk].parameters())

    def before(self, step: Step) -> None:
        if self._gather and step in self._plan.gathered:
            chunk = self._plan.gathered[step]
            self._gather[chunk](self._models[chunk].parameters())
        elif step in self._closing:
            self._held_back.close()

    def after(self, step: Step) -> None:
        if step in self._closing:
            self._hold_back()
        elif not self._starts_itself and self._plan.chunks > 1 and step in self._plan.reduced:
            self._held_back.close()
            self._start(self._plan.reduced[step])
            self._hold_back()

    def end(self) -> None:
        self._held_back.close()
        if not self._starts_itself:
            for chunk in range(self._plan.chunks):
                if chunk not in self._reduced:
                    self._start(chunk)

    def _hold_back(self) -> None:
        for no_sync in self._no_sync:
            self._held_back.enter_context(no_sync())

    def _start(self, chunk: int) -> None:
        self._reduce[chunk](self._models[chunk].parameters())
        self._reduced.add(chunk)


def _listed(functions: Any, count: int) -> list[Callable[..., Any]]:
    """Megatron's field: one function, one per chunk, or none."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, (list, tuple)) else [functions] * count
