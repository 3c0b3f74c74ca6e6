"""Trains with a sleep after every step, and compares with a training without sleep.

A script of `tests.harness.jobs`: `sleeping.py OUT LAYOUT FROZEN CYCLES FLAG...`. Each rank writes OUT/<rank>.json:
faults, and by cycle the bytes of tensors awake and asleep, of host blocks and of the process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.memory import sleep as sleeping
from mindspeed_lite.memory.copy_engine import PinnedPiece
from mindspeed_lite.platform import process_memory
from tests.harness import core_loop, live_undo, simulated
from tests.harness.rows import flags_of, options_of

# Parts in the order in which they wake, by cycle.
ORDERS: tuple[tuple[str, ...], ...] = ((), ("weights", "optimizer", "gradients"), ("gradients", "optimizer", "weights"))


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        # Of a copy: a storage that NumPy has seen keeps its size.
        found.update(each.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def weights(training: core_loop.Training) -> str:
    return digest([each for model in training.models for each in model.parameters()])


def states(training: core_loop.Training) -> str:
    pairs = [*live_undo.states(training)]
    return digest([each for main, state in pairs for each in (main, *state.values()) if torch.is_tensor(each)])


def blocks() -> list[torch.Tensor]:
    """Host memory of all models that have slept."""
    return [each for one in sleeping._sleepers.values() for _, memory in one._memory.values() for each in memory.blocks]


def live_bytes() -> int:
    """Of all tensors that Python knows, without what is host memory on a device."""
    everything = gc.get_objects()
    hosts = [*blocks(), *(each.tensor for each in everything if type(each) is PinnedPiece)]
    host_storages = {each.untyped_storage()._cdata for each in hosts}
    storages = {}
    for each in everything:
        # A sleeping parameter has another type.
        if (
            type(each).__name__ in ("Tensor", "Parameter")
            and torch.is_tensor(each)
            and each.untyped_storage().resizable()
        ):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    return sum(nbytes for storage, nbytes in storages.items() if storage not in host_storages)


def refused(faults: list[str], what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except sleeping.SleepError as error:
        if "\n" in str(error):
            faults.append(f"{what}: {error}")
    else:
        faults.append(f"{what}: allowed")


def refusals(training: core_loop.Training, faults: list[str]) -> None:
    """What must fail with a line while all of it sleeps."""
    model, optimizer = training.models[0], training.optimizer
    refused(faults, "sleep twice", lambda: mindspeed_lite.sleep(training.models, optimizer))
    refused(faults, "forward pass", lambda: model(torch.zeros(1, 1).long()))
    refused(faults, "forward pass of a layer", lambda: next(model.children())(torch.zeros(1, 1).long()))
    refused(faults, "zero", model.zero_grad_buffer)
    refused(faults, "step", optimizer.step)
    refused(faults, "checkpoint", lambda: model.state_dict())
    refused(faults, "parameters of a layer", lambda: next(model.children()).state_dict())
    refused(faults, "optimizer's checkpoint", optimizer.state_dict)


def cycle(training: core_loop.Training, number: int, faults: list[str]) -> tuple[int, int]:
    """Sleep and wake; live bytes awake and asleep."""
    training.zero()
    live_undo.finish_gathers(training)
    gc.collect()
    awake, before, attributes = live_bytes(), (weights(training), states(training)), live_undo.described(training)
    report = str(mindspeed_lite.sleep(training.models, training.optimizer))
    asleep = live_bytes()
    if number == 0:
        refusals(training, faults)
        print(report, flush=True)
    for part in ORDERS[number % len(ORDERS)]:
        mindspeed_lite.wake(part)
        if part == "weights" and weights(training) != before[0]:
            faults.append(f"{number}: weights have other bits once they are awake")
    if not ORDERS[number % len(ORDERS)]:
        mindspeed_lite.wake(model=training.models)
    if (weights(training), states(training)) != before:
        faults.append(f"{number}: weights or states have other bits")
    after = live_undo.described(training)
    changed = [key for key in after.keys() | attributes.keys() if after.get(key) != attributes.get(key)]
    faults += [f"{number}: {key} is {after.get(key)}, was {attributes.get(key)}" for key in changed]
    refused(faults, "wake twice", mindspeed_lite.wake)
    return awake, asleep


def main() -> None:
    out, layout, kind, cycles, *flags = sys.argv[1:]
    simulated.streams()
    simulated.virtual_optimizer()
    dist.init_process_group("nccl")
    mindspeed_lite.enable(**flags_of(" ".join(flags)))
    options: dict[str, Any] = {**options_of(layout), "frozen": kind}
    faults: list[str] = []
    steady = core_loop.Training(options)
    expected = [steady.step() for _ in range(int(cycles) + 1)]
    live_undo.finish_gathers(steady)
    end = weights(steady), states(steady)
    del steady
    gc.collect()
    # Its hooks may keep it.
    others = live_bytes()
    training = core_loop.Training(options)
    found, sizes = [training.step()], []
    for number in range(int(cycles)):
        awake, asleep = cycle(training, number, faults)
        found.append(training.step())
        sizes.append((awake - others, asleep - others, sum(map(len, blocks())), process_memory.resident()))
    if found != expected:
        faults.append(f"losses and norms {found}, without sleep {expected}")
    live_undo.finish_gathers(training)
    if (weights(training), states(training)) != end:
        faults.append("weights or states of the end have other bits")
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps({"faults": faults, "sizes": sizes}))


if __name__ == "__main__":
    main()
