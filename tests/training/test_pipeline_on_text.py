"""Twenty steps on real text in every order of a pipeline, against the same model without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import matrix
from tests.harness.core_trainings import fault, losses
from tests.harness.training import Trainer

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED = {"use_gradient_accumulation_fusion": True, "strict": True}
# Flags, and options beside the layout's.
ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dualpipev": ({"schedules_method": "dualpipev"}, {"vpp": 2}),
    "dualpipev-dw-detach": ({"schedules_method": "dualpipev", "dualpipev_dw_detach": True}, {"vpp": 2}),
    "zb-auto": ({"pipeline_schedule": "zb-auto"}, {}),
    "in advance": ({"recompute_in_advance": True}, {"config": FULL}),
    "in the bubble": ({"recompute_in_bubble": True, "pipeline_schedule_max_live": 1}, {"config": FULL}),
}
# Options of both trainings, flags of both.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "tensor parallel": ({"tp": 2, "sp": True}, {}),
    "experts": ({"ep": 2, "experts": 4}, {}),
    "context parallel": (
        {"cp": 2},
        {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo", "use_flash_attn": True},
    ),
    "tied": ({"tied": True}, {}),
    "multi-token prediction": ({"config": {"mtp_num_layers": 1}}, {}),
    "recomputed": ({"config": FULL}, {}),
}
BASE = {"layers": 4, "micro_batches": 5, "by_name": True, "wgrad_fusion": True, "steps": 20, "lr": 1e-3}
# DualPipeV needs an embedding of its own, and no further tokens; in the bubble is for models that recompute nothing.
APART = {
    *((order, layout) for order in ORDERS if order.startswith("dual") for layout in ("tied", "multi-token prediction")),
    ("in the bubble", "recomputed"),
}


@matrix.whole
@pytest.mark.parametrize(
    ("order", "layout"), [(order, layout) for layout in LAYOUTS for order in ORDERS if (order, layout) not in APART]
)
def test_it_trains_as_a_model_without_a_pipeline(trainer: Callable[[str], Trainer], layout: str, order: str) -> None:
    options, flags = LAYOUTS[layout]
    own, more = ORDERS[order]
    both = {**BASE, "text": str(TEXT), **options}
    config = {**options.get("config", {}), **more.get("config", {})}
    processes = 2 if {"tp", "ep", "cp"} & options.keys() else 1
    one = trainer("0.19.2").core("features", processes, both, flags={**FUSED, **flags})
    piped = {**both, **more, "config": config, "pp": 2}
    result = trainer("0.19.2").core("features", 2 * processes, piped, flags={**FUSED, **flags, **own})
    # DualPipeV has its losses on the ranks of the first stage.
    found = result.history(processes - 1 if order.startswith("dual") else -1)
    assert len(losses(one)) == 20 and losses(one)[-1] < losses(one)[0] - 0.3
    assert fault(one.history(), found) == ""
