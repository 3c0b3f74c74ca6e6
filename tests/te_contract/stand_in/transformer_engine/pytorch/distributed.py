"""Random states, recomputation, and collectives of tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint


class CudaRNGStatesTracker:
    """Named random states."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table of states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A new state of a seed."""
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"seed {seed} or state {name} already exists")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state."""
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


def get_all_rng_states() -> dict[str, Any]:
    """States that graphs register: none, as nothing is captured."""
    return {}


class activation_recompute_forward(contextlib.AbstractContextManager[Any]):
    """Marks a forward pass that is recomputed, for the state of fp8."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        super().__init__()

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the forward pass that runs is recomputed in fp8."""
    return False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` now and again in the backward pass, with the same random states."""
    use_reentrant = kwargs.pop("use_reentrant", True)
    if kwargs.pop("distribute_saved_activations", False):
        raise RuntimeError("Transformer Engine's stand-in keeps inputs whole")
    kwargs.pop("tp_group", None)
    tracker = (kwargs.pop("get_rng_state_tracker", None) or CudaRNGStatesTracker)()
    states: list[dict[str, torch.Tensor]] = []

    def run(*inputs: Any) -> Any:
        now = tracker.get_states()
        if not states:
            states.append(now)
            return function(*inputs, **kwargs)
        tracker.set_states(dict(states[0]))
        try:
            return function(*inputs, **kwargs)
        finally:
            tracker.set_states(now)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant)
