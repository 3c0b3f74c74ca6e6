"""What a subcommand reads off a training command besides the training itself: how many ranks, for which device."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mindspeed_lite import planner

_LAUNCHER = {"--nproc-per-node": "per node", "--nproc_per_node": "per node", "--nnodes": "nodes"}


def world_size(given: int | None, command: Sequence[str]) -> int:
    """How many ranks: by our flag (`given`), by torchrun's flags, by the environment, or one."""
    if given is not None:
        if given < 1:
            raise planner.ArgumentError(f"--world-size is at least 1, not {given}")
        return given
    found: dict[str, str] = {}
    for place, word in enumerate(command):
        flag, has_value, value = word.partition("=")
        if flag in _LAUNCHER:
            found[_LAUNCHER[flag]] = value if has_value else next(iter(command[place + 1 : place + 2]), "")
    if "per node" not in found:
        found = {"per node": os.environ.get("WORLD_SIZE", "1")}
        if not found["per node"].isdecimal() or int(found["per node"]) < 1:
            raise planner.ArgumentError(
                f"WORLD_SIZE={found['per node'][:40]} does not say how many ranks there will be: add --world-size N "
                "before the `--`"
            )
    try:
        count = int(found["per node"]) * int(found.get("nodes", "1"))
        if count < 1:
            raise ValueError(count)
        return count
    except ValueError:
        raise planner.ArgumentError(
            "--nproc-per-node and --nnodes do not say how many ranks there will be: add --world-size N before the `--`"
        ) from None


def device() -> str:
    """The device that is asked for, the accelerator that is here, or the kind that most trainings are for."""
    asked = os.environ.get("MINDSPEED_LITE_DEVICE", "auto")
    if asked in ("cpu", "cuda", "npu"):
        return asked
    return "npu" if os.path.exists("/dev/davinci_manager") else "cuda"
