"""What a job does to collectives before features are on: count the messages that ours send, delay each at random."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
EXCHANGES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
SENT = "messages sent in flight: "


def count(
    longest_delay: float = 0.0,
    dies_after: int | None = None,
    names: Sequence[str] = COLLECTIVES,
    is_async: bool = True,
) -> None:
    """Count calls by name at run time, asynchronous ones or all; Megatron's linear layers took theirs when they were
    imported."""
    import torch.distributed as dist

    sent = 0
    chance = random.Random(int(os.environ["RANK"]))

    def around(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            if kwargs.get("async_op") or not is_async:
                sent += 1
                time.sleep(chance.random() * longest_delay)
                if sent == dies_after:
                    os._exit(9)
            return original(*args, **kwargs)

        return collective

    for name in names:
        changed = around(getattr(dist, name))
        # The device layer wraps what it finds in the second.
        setattr(dist, name, changed)
        setattr(dist.distributed_c10d, name, changed)
    ended = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        print(f"{SENT}{sent}", flush=True)
        ended(*args, **kwargs)

    dist.destroy_process_group = destroy_process_group


def delay() -> None:
    """Up to 5 ms before each message, different on every rank."""
    count(5e-3)


def delay_exchanges() -> None:
    """Up to 3 ms before each message of an exchange, different on every rank."""
    count(3e-3, names=EXCHANGES, is_async=False)


def die() -> None:
    """The last rank is gone in the middle of a training, between two slices."""
    count(dies_after=1001 if os.environ["RANK"] == "1" else None)


def sent(log: str) -> int:
    """What a job's rank counted."""
    return int(log.rpartition(SENT)[2].split()[0])
