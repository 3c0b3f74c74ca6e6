"""`--enable-expert-placement`: experts that change places at random change no bit, whatever the optimizer and layout.

Two rows of a token add up to the same bits in any order, and gradients are not clipped. Each training goes on for two
steps after undo. Checkpoints are in `test_checkpoints.py`. As a script of `tests.harness.jobs` on two ranks,
`test_enable_expert_placement.py OUT`, each rank writes OUT/<rank>.json, the faults of `predicted` and `refused`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite import platform, runtime
from mindspeed_lite.parallel.balance import placement, placer, record
from mindspeed_lite.patches import enable_expert_placement as patch
from tests.harness import core_loop, rows, simulated, skewed_router
from tests.harness.rows import NEW, Near, Rows
from tests.harness.training import Trainer

OVERLAPPED = "dist overlap_grad overlap_gather bucket4096"
FUSED = "use_fused_adamw"
BOTH = f"{FUSED} quant_states=fp8 reuse_fp32_param"
GROUPED = "moe_grouped_gemm moe_permute_fusion"
BASE = "ep2 experts8 router_fp32 unclipped undone"
# A norm is that of the squares of all ranks, in another order.
placed = Rows(
    "placed", {
        "fp32": NEW, "fp32 dist": "", "": "", "dist": "", OVERLAPPED: "", "bias": "", "shared": "", "dropped": "",
        "bias_of_experts": "", "unbalanced mtp": "", "again_experts": "", "full": "", "tp2 sp etp1": "",
    }, "enable_expert_placement expert_placement_freq=2 expert_placement_break_even=0.0", base=BASE,
    before="drawn_placements", seen=("experts changed places",), near=Near(0.0, 1e-5, 1e-5), steps=6,
)  # fmt: skip


def together(both: str, *layouts: str, **more: Any) -> Rows:
    return replace(placed, both=both, name=f"placed, {both}", layouts=dict.fromkeys(layouts, ""), **more)


# With one expert a rank Megatron 0.16 frees what its backward pass reads; here a rank has two.
FOUR: dict[str, Any] = {"releases": ["0.16.1", NEW]}
# A token's rows are added within a rank first, or an expert's rows by copies.
OTHER_ORDER = Near(1e-5, 1e-5, 1e-5)
TABLE = [
    placed,
    together("reset_bucket_group_order", OVERLAPPED),
    together("param_gather_once", "dist"),
    together(FUSED, "dist"),
    together(f"{FUSED} reuse_fp32_param", "dist", ""),
    together(f"{FUSED} quant_states=bf16", "dist"),
    together(f"{FUSED} quant_states=fp8", "dist"),
    replace(placed, name="placed, both", both=BOTH, layouts={OVERLAPPED: NEW}),
    together(f"{FUSED} virtual_optimizer=[all]", "dist", before="drawn_placements virtual_optimizer"),
    together(f"{FUSED} swap_optimizer", "dist", before="drawn_placements swap_optimizer"),
    together("moe_grouped_gemm", ""),
    # Before Megatron 0.17 no layer of its own delays weight gradients.
    together(f"moe_grouped_gemm {rows.WGRAD} delay_wgrad_compute moe_fb_overlap",
           "wgrad overlap_grad no_sync combined delayed", releases=["0.17.1", "0.18.2", NEW]),
    together(f"{GROUPED} moe_hierarchical_alltoallv moe_node_size=1", "permute_fused"),
    together(f"{GROUPED} moe_zero_memory=level1", "permute_fused"),
    together("moe_grouped_gemm balanced_moe_experts balanced_moe_break_even=0.0", "fp32", near=OTHER_ORDER),
    together("", "fp32 allgather", near=OTHER_ORDER),
    together("", "ep4", "ep4 dist", "tp2 sp", f"tp2 sp {OVERLAPPED}", "ep4 tp2 sp etp1", "pp2", "pp2 dist",
           f"dp2 {OVERLAPPED}", **FOUR),
    together(BOTH, f"dp2 {OVERLAPPED}", **FOUR),
    replace(placed, name="50 steps", steps=50, releases=[NEW],
            layouts={"dist": "", "ep4 dist": "", f"tp2 sp {OVERLAPPED}": "", "pp2 dist": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("release", "row", "layout"), rows.parameters(TABLE))
def test_experts_that_change_places_change_no_bit(
    trainer: Callable[[str], Trainer], release: str, row: Rows, layout: str, tmp_path: Path
) -> None:
    rows.check(trainer(release), row, layout, tmp_path)


def test_loads_are_as_predicted_and_states_that_are_elsewhere_are_refused(
    trainer: Callable[[str], Trainer], tmp_path: Path
) -> None:
    trainer(NEW).run(entry="script", arm="device", nproc=2, argv=[__file__, str(tmp_path)]).check()
    found = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)}
    assert found == {0: [], 1: []}


# ---------------------------------------------------------------------------------------------------------------------
# On a rank

PLACED = {"enable_expert_placement": True, "expert_placement_break_even": 0.0}


def _build() -> core_loop.Training:
    from megatron.core import parallel_state as ps

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    return core_loop.Training(rows.options_of(f"{BASE} fp32"))


def _predicted(out: Path) -> list[str]:
    """A router of skew 4 to 1: what ranks received after the placement, by the record, against the prediction."""
    steps, file = 4, out / "load.jsonl"
    chosen, own = [], placer.PlacedExperts.chosen

    def choose(self: Any, loads: Any, price: float) -> Any:
        chosen.append(own(self, loads, price))
        return chosen[-1]

    undo = skewed_router.install(4.0)
    flags = {**PLACED, "expert_placement_freq": 2, "moe_record_load": str(file),
             "moe_record_load_interval": steps}  # fmt: skip
    args = {"num_experts": 8, "train_iters": steps, "expert_model_parallel_size": 2}
    with (
        mock.patch.object(placer.PlacedExperts, "chosen", choose),
        mindspeed_lite.enabled(host_args=args, strict=True, **flags),
    ):
        training = _build()
        for _ in range(steps):
            training.step()
    undo()
    dist.barrier()
    ranks = torch.tensor([each.ranks for each in record.read(file).steps]).double()
    imbalance = ranks.max(-1).values / ranks.mean(-1)
    found = []
    for layer, (_, before, after) in enumerate(chosen[: ranks.shape[1]]):
        for step, expected in enumerate((before, before, after, after)):
            got = float(imbalance[step, layer])
            if abs(got - expected) > 0.05 * expected:
                found.append(f"step {step + 1}: fullest over mean {got}, predicted {expected}")
        if before < 1.5 or after > 1.05:
            found.append(f"predicted {before} before and {after} after; 1.6 and 1.0 are known")
    return found if chosen else ["nothing was predicted"]


def _refused() -> list[str]:
    """What may not be asked for while experts are elsewhere, and experts that stay where they are."""
    found = []
    flags = {**PLACED, "expert_placement_freq": 1}
    with mock.patch.object(placement, "chosen", simulated.drawn(3)), mindspeed_lite.enabled(**flags):
        training = _build()
        training.step()
        for what, ask in (
            ("the model's state", training.models[0].state_dict),
            ("the optimizer's state", training.optimizer.state_dict),
        ):
            try:
                ask()
                found.append(f"{what} was given")
            except RuntimeError as error:
                if "other places than their names say" not in str(error):
                    found.append(f"{what}: {error}")
        training.models[0].sharded_state_dict()
        training.models[0].state_dict()
        training.step()
        training.forward_backward()
        (text,) = mindspeed_lite.disable() or ("nothing",)
        platform.activate()
        if "within a step" not in text:
            found.append(f"ended within a step: {text}")
    with mock.patch.object(placement, "chosen", simulated.drawn(3)), mindspeed_lite.enabled(**flags):
        training = _build()
        experts = [each.experts for each in training.models[0].modules() if type(each).__name__ == "MoELayer"]
        if dist.get_rank() == 0:
            next(experts[0].local_experts[1].parameters()).requires_grad_(False)
        for _ in range(2):
            training.forward_step(training.iterators[0], training.models[0])
            runtime.current().session.find(patch.NAME).end_step_of(training.optimizer)
        layers = [*runtime.current().session.find(patch.NAME).layers.values()]
        if not layers[0].is_home or layers[1].is_home:
            found.append("a layer with a frozen expert on one rank moved, or the other did not")
        reasons = [each.reason for each in mindspeed_lite.report().fallbacks]
        if len(reasons) != 1 or "differ in shape, or in what is trained" not in reasons[0]:
            found.append(f"reasons {reasons}")
    return found


def main() -> None:
    out = sys.argv[1]
    dist.init_process_group("nccl")
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps([*_predicted(Path(out)), *_refused()]))


if __name__ == "__main__":
    main()
