"""A group for each direction of a pipeline's messages: the same bits, in Megatron's schedules and in orders of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import matrix
from tests.harness.training import Trainer

STEPS = {"steps": 2, "digest": True, "evaluate": True}
FUSION = {"use_gradient_accumulation_fusion": True, "strict": True}
V = {"layers": 4, "vpp": 2, "micro_batches": 5, "wgrad_fusion": True}
# Number of processes, options, flags of both trainings.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two stages": (2, {"pp": 2}, {}),
    "four stages": (4, {"pp": 4, "layers": 4, "micro_batches": 6}, {}),
    "virtual stages, overlapped": (2, {"pp": 2, "vpp": 2, "layers": 4}, {}),
    "four stages of two, not overlapped": (
        4,
        {"pp": 4, "vpp": 2, "layers": 8, "config": {"overlap_p2p_comm": False, "batch_p2p_comm": True}},
        {},
    ),
    "lengths exchanged": (
        2,
        {"pp": 2, "config": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}},
        {},
    ),
    "1f1b of ours": (2, {"pp": 2}, {"pipeline_schedule": "1f1b"}),
    "interleaved of ours": (4, {"pp": 4, "vpp": 2, "layers": 8}, {"pipeline_schedule": "interleaved"}),
    "zero-bubble": (4, {"pp": 4, "layers": 4, "wgrad_fusion": True}, {**FUSION, "pipeline_schedule": "zb-h1"}),
    "dualpipev": (2, {"pp": 2, **V}, {**FUSION, "schedules_method": "dualpipev", "dualpipev_dw_detach": True}),
    "recomputed in advance": (
        2,
        {
            **{"pp": 2, "vpp": 2, "layers": 4},
            "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        },
        {"recompute_in_advance": True},
    ),
}


@pytest.mark.parametrize(
    ("release", "layout"), matrix.pairs([*LAYOUTS], [("0.16.1", "four stages")], newest=["four stages", "zero-bubble"])
)
def test_the_same_bits(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options, flags = LAYOUTS[layout]
    options = {**options, **STEPS}
    flags = {"strict": True, **flags}
    off = trainer(release).core("features", nproc, options, flags=flags)
    on = trainer(release).core("features", nproc, options, flags={**flags, "optimize_send_recv_comm": True})
    assert [on.history(rank) for rank in range(nproc)] == [off.history(rank) for rank in range(nproc)]
    assert "gradients" in dict(off.history(0))
