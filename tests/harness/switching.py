"""Trains, generates and trains on with features off meanwhile, and compares with a training that never switches.

A script of `tests.harness.jobs`: `switching.py OUT`. Writes OUT/switched.json: what differs, and memory by switch.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

import mindspeed_lite
from mindspeed_lite.platform import process_memory
from tests.harness import core_loop, live_undo
from tests.harness.feature_layouts import host_args
from tests.harness.jobs import called

FLAGS: dict[str, Any] = {
    "use_flash_attn": True,
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "use_fused_cross_entropy": True,
    "use_fused_embedding": True,
    "use_fused_rotary_pos_emb": True,
    "use_fused_adamw": True,
    "strict": True,
}
CYCLES = 8


def generate(model: Any, count: int = 6) -> torch.Tensor:
    """The logits of greedy continuations of two prompts, all steps of them."""
    tokens = torch.arange(16).reshape(2, 8)
    found = []
    with torch.no_grad():
        for _ in range(count):
            positions = torch.arange(tokens.shape[1]).repeat(2, 1)
            logits = model(tokens.cuda(), positions.cuda(), None)
            found.append(logits.float().cpu())
            tokens = torch.cat([tokens, found[-1][:, -1:].argmax(-1)], 1)
    return torch.cat(found, 1)


def held(training: core_loop.Training) -> list[torch.Tensor]:
    """Copies of the weights, and of all that the optimizer keeps."""
    weights = [each.detach() for model in training.models for each in model.parameters()]
    kept = [value for _, state in live_undo.states(training) for value in state.values() if torch.is_tensor(value)]
    return [each.clone() for each in (*weights, *kept)]


def main() -> None:
    folder = Path(sys.argv[1])
    # The device layer, and nothing else; a block of `enabled` leaves it on.
    mindspeed_lite.enable()
    core_loop.dist.init_process_group("nccl")
    plain = core_loop.Training({})
    faults: list[str] = []
    resident: list[float] = []
    with mindspeed_lite.enabled(host_args=host_args("plain"), **FLAGS):
        steady, switched = core_loop.Training({}), core_loop.Training({})
        kinds = _kinds(switched)
        for each in (steady, switched):
            each.step()
    for cycle in range(CYCLES):
        with mindspeed_lite.enabled(host_args=host_args("plain"), **FLAGS):
            expected = steady.step()
        before = held(switched)
        logits = generate(switched.models[0])
        for mine, theirs in zip(switched.models[0].parameters(), plain.models[0].parameters(), strict=True):
            theirs.data.copy_(mine.data)
        if not torch.equal(logits, generate(plain.models[0])):
            faults.append(f"{cycle}: generation is not that of a model that never had features")
        if any(not torch.equal(a, b) for a, b in zip(before, held(switched), strict=True)):
            faults.append(f"{cycle}: generation or a switch changed weights or moments")
        with mindspeed_lite.enabled(host_args=host_args("plain"), **FLAGS) as report:
            if any(not torch.equal(a, b) for a, b in zip(before, held(switched), strict=True)):
                faults.append(f"{cycle}: turning on changed weights or moments")
            if _kinds(switched) != kinds:
                faults.append(f"{cycle}: norms or optimizer are {_kinds(switched) ^ kinds}")
            found = switched.step()
            if report.fallbacks:
                faults.append(f"{cycle}: {report.fallbacks}")
        if found != expected:
            faults.append(f"{cycle}: loss and norm {found}, without a switch {expected}")
        gc.collect()
        resident.append(process_memory.resident())
    missing = {"adamw", "attention", "rms_norm"} - set(called())
    if missing:
        faults.append(f"never called: {sorted(missing)}")
    (folder / "switched.json").write_text(json.dumps({"faults": faults, "resident": resident}))


def _kinds(training: core_loop.Training) -> set[str]:
    """What norms and optimizers are instances of."""
    found = {type(each).__qualname__ for each in training.models[0].modules() if "Norm" in type(each).__qualname__}
    return found | {type(each).__qualname__ for each in live_undo.inner_optimizers(training)}


if __name__ == "__main__":
    main()
