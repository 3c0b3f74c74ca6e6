"""What a training job calls before it begins, so that its rank 1 is killed in its third step: where, by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

LOST, STEP = 1, 3


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Act before call `number` of a function."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def _in_step(act: Callable[[], None]) -> None:
    from megatron.training import training

    if os.environ["RANK"] == str(LOST):
        _at_call(training, "train_step", STEP, act)


def before_a_step() -> None:
    """The others are in the forward pass's messages, or in those of the gradients."""
    _in_step(_killed)


def in_a_ring() -> None:
    """Between two hops of a ring."""
    import torch.distributed

    _in_step(lambda: _at_call(torch.distributed, "batch_isend_irecv", 2, _killed))


def in_an_exchange() -> None:
    """Between two exchanges of experts' tokens: of a layer, one has been sent and another has not."""
    import torch.distributed

    _in_step(lambda: _at_call(torch.distributed, "all_to_all_single", 4, _killed))


def in_a_gather() -> None:
    """Between two gatherings of experts' tokens."""
    import torch.distributed

    _in_step(lambda: _at_call(torch.distributed, "all_gather_into_tensor", 4, _killed))
