"""A second process group of the ranks of one of Megatron's, so that messages of two kinds do not queue together."""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Session


def second_group(group: Any, session: Session) -> Any:
    """Another group of the same ranks, made once: all of them make the first call at the same place."""
    import torch.distributed as dist

    made: dict[Any, Any] = session.state("second groups", dict)
    if group not in made:
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        made[group] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return made[group]
