"""The model of experts that benchmarks train: two ranks share them, with every fused form of Megatron's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

RANKS = 2


def training(
    options: argparse.Namespace, experts: int, moe: Mapping[str, Any], config: Mapping[str, Any], **others: Any
) -> Any:
    """A training of `options.layers` layers of `options.hidden`, with these settings besides."""
    from tests.harness import core_loop

    core_loop.SEQUENCE, core_loop.MICRO_BATCH = options.sequence, 1
    return core_loop.Training(
        {
            "experts": experts,
            "ep": RANKS,
            "layers": options.layers,
            "micro_batches": options.micro_batches,
            "wgrad_fusion": True,
            "no_sync": True,
            "moe": {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True, **moe},
            "config": {"hidden_size": options.hidden, **config},
            **others,
        }
    )
