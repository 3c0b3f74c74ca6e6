"""What a pipeline schedule recomputes, between Megatron's checkpoints and the executor that runs the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_lite.engine import OptionError, Session
from mindspeed_lite.memory.recompute_ahead import RecomputedUnits, Unit

from . import pipeline_orders


def of(session: Session) -> RecomputedUnits:
    """The session's, which the feature's patch has made."""
    stores_others = bool(session.settings.get(pipeline_orders.IN_BUBBLE))
    found: RecomputedUnits | None = session.find(pipeline_orders.RECORDED)
    return found or session.state(pipeline_orders.RECORDED, lambda: RecomputedUnits(_snapshot, stores_others))


def for_step(session: Session, config: Any, units: frozenset[Unit]) -> RecomputedUnits | None:
    """What records `units` in a training step; None where no feature makes recomputation a step.

    Raises OptionError if the model's configuration recomputes nothing that could be one.
    """
    if not pipeline_orders.recomputes_in_steps(pipeline_orders.in_force(session)):
        return None
    if config.recompute_granularity != "full":
        raise OptionError(
            "recompute_in_bubble: the model's configuration has no full recomputation, which steps could run: set "
            "recompute_granularity to 'full', recompute_method to 'uniform' and recompute_num_layers to 1"
        )
    found = of(session)
    found.begin(units)
    return found


def _snapshot() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Megatron's states of random numbers, and what its checkpoint does around a second run."""
    from megatron.core.tensor_parallel import random

    states = random._get_all_rng_states()
    # Before 0.16 no code asks whether a checkpoint runs.
    begin, end = (getattr(random, f"_{name}_checkpointing", lambda: None) for name in ("set", "unset"))

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        begin()
        try:
            with random._fork_rng():
                random._set_all_rng_states(*states)
                yield
        finally:
            end()

    return restored
