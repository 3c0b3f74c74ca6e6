"""Trains, sleeps and wakes eight times, and has the bits of a training without sleep (`tests.harness.sleeping`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import matrix, sleeping
from tests.harness.rows import options_of, ranks_of
from tests.harness.training import Trainer

_OVERLAPPED = "dp2 dist overlap_grad overlap_gather no_sync"
_STATES = {
    "fused": "use_fused_adamw",
    "shared": "reuse_fp32_param",
    "fp8": "quant_states=fp8 reuse_fp32_param",
    "swapped": "swap_optimizer reuse_fp32_param",
    "virtual": "virtual_optimizer=[all]",
}
# Layout and features.
ROWS: dict[str, tuple[str, str]] = {
    "DDP": ("", ""),
    "distributed": ("dist", ""),
    "gathers": (_OVERLAPPED, ""),
    "gathers in another order": (_OVERLAPPED, "reset_bucket_group_order param_gather_once"),
    "TP2": ("tp2 sp dist", ""),
    "PP2": ("pp2 tied dist", ""),
    "V": ("pp2 vpp2 layers4", ""),
    "EP2": ("experts4 ep2 dist", ""),
    "fp32": ("fp32 dp2 dist", ""),
    "grouped": ("experts4 wgrad", "moe_grouped_gemm gradient_accumulation_fusion use_flash_attn use_fused_rmsnorm"),
    "placed": ("experts4 ep2", "enable_expert_placement expert_placement_freq=1 expert_placement_break_even=0.0"),
    "copied": ("experts4 ep2", "balanced_moe_experts balanced_moe_break_even=0.0"),
    "delayed": ("pp2", "pipeline_schedule=zb-h1"),
    **{f"{name} {base}".strip(): (base, flags) for name, flags in _STATES.items() for base in ("", "dp2 dist", "tp2")},
}
QUICK = [("0.19.2", name) for name in ("gathers", "fp8", "swapped", "virtual dp2 dist")]


def faults(trainer: Trainer, layout: str, flags: str, out: Path, cycles: int = 8, kind: str = "") -> list[str]:
    ranks, script = ranks_of(options_of(layout)), str(Path(sleeping.__file__))
    argv = [script, str(out), layout, kind, str(cycles), *flags.split()]
    trainer.run(entry="script", arm="device", nproc=ranks, timeout=600, argv=argv).check()
    every = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    found = [text for each in every for text in each["faults"]]
    for sizes in (each["sizes"] for each in every):
        found += [f"{asleep} of {awake} bytes stay" for awake, asleep, *_ in sizes if asleep > 0.02 * awake]
        (*_, blocks, resident), *others = sizes[1:]
        if any(each[2] != blocks or each[3] > resident + 8e6 for each in others):
            found.append(f"memory grows: {sizes}")
    return found


@pytest.mark.parametrize(("release", "name"), matrix.only(QUICK, [(r, n) for r in ("0.16.1", "0.19.2") for n in ROWS]))
def test_a_training_sleeps(trainer: Callable[[str], Trainer], release: str, name: str, tmp_path: Path) -> None:
    assert faults(trainer(release), *ROWS[name], tmp_path) == []


@matrix.whole
@pytest.mark.parametrize("kind", ["LoRA", "frozen embedding", "only norms"])
def test_frozen_weights_sleep(trainer: Callable[[str], Trainer], kind: str, tmp_path: Path) -> None:
    assert faults(trainer("0.19.2"), "dist", "use_fused_adamw", tmp_path, kind=kind) == []
