"""Random states, recomputation, and collectives of tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint


class CudaRNGStatesTracker:
    """Random states that graphs can capture: nothing is captured."""

    def __init__(self) -> None:
        raise RuntimeError("Transformer Engine's stand-in tracks no random states: leave --te-rng-tracker out")


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


class _NoStates:
    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` now and again in the backward pass, with the same random states."""
    use_reentrant = kwargs.pop("use_reentrant", True)
    if kwargs.pop("distribute_saved_activations", False):
        raise RuntimeError("Transformer Engine's stand-in keeps inputs whole")
    kwargs.pop("tp_group", None)
    tracker = (kwargs.pop("get_rng_state_tracker", None) or _NoStates)()
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
