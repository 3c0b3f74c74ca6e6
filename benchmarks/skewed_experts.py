"""Trainings of experts behind a router of known skew, step by step in two arms: what benchmarks of balancing share."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import expert_model
from benchmarks.expert_model import RANKS
from lab.ranks import Loopback, Rates, on_ranks
from mindspeed_lite.bench.statistics import paired_ratio

ARMS = ("off", "on")
FUSED = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_flash_attn",
         "use_gradient_accumulation_fusion", "use_fused_swiglu")  # fmt: skip
SKEW = "*skew*: tokens of an expert of the first rank to one of the second."


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options of the model and of the race."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    found.add_argument("--skews", type=float, nargs="+", default=[4.0, 1.0])
    found.add_argument("--sequence", type=int, default=1024)
    found.add_argument("--hidden", type=int, default=256)
    found.add_argument("--expert-hidden", type=int, default=1024)
    found.add_argument("--layers", type=int, default=2)
    found.add_argument("--experts", type=int, default=8)
    found.add_argument("--topk", type=int, default=2)
    found.add_argument("--micro-batches", type=int, default=4)
    found.add_argument("--repeats", type=int, default=6)
    found.add_argument("--page", type=Path)
    return found


def model(options: argparse.Namespace) -> str:
    """What is trained, in the words of a page."""
    return (
        f"{RANKS} processes, a core each, gloo on loopback. {options.layers} layers of {options.hidden}, "
        f"{options.experts} experts of {options.expert_hidden}, {options.topk} a token, {options.micro_batches} "
        f"micro-batches of {options.sequence} tokens a process, bf16"
    )


def run(options: argparse.Namespace, race: Callable[[Race], dict[str, Any]]) -> Any:
    """What `race` finds on rank 0 for each skew, on two processes that have no other work."""
    return on_ranks(RANKS, Loopback(), functools.partial(_each_skew, options, race))


def _each_skew(options: argparse.Namespace, race: Callable[[Race], dict[str, Any]], rates: Rates) -> Any:
    import mindspeed_lite
    from tests.harness import skewed_router

    rows, found = _Rows(), []
    with mindspeed_lite.enabled(**dict.fromkeys(FUSED, True)):
        for skew in options.skews:
            uninstall = skewed_router.install(skew)
            found.append({"skew": skew, **race(Race(options, skew, rows))})
            uninstall()
    return found


class _Rows:
    """Rows that this rank's experts multiply."""

    def __init__(self) -> None:
        from mindspeed_lite.patches import moe_grouped_gemm

        self.count = 0
        multiply = moe_grouped_gemm.grouped_matmul

        @functools.wraps(multiply)
        def grouped_matmul(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.count += len(x)
            found: torch.Tensor = multiply(x, *args, **kwargs)
            return found

        moe_grouped_gemm.grouped_matmul = grouped_matmul


class Race:
    """One training, and the steps of its arms.

    Attributes:
        training: whose router has the skew.
    """

    def __init__(self, options: argparse.Namespace, skew: float, rows: _Rows) -> None:
        self.options, self.skew, self._rows = options, skew, rows
        width = options.expert_hidden
        self.training = expert_model.training(
            options,
            options.experts,
            {"moe_router_topk": options.topk, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
            {"ffn_hidden_size": width, "moe_ffn_hidden_size": width},
        )
        self._told: dict[str, list[tuple[float, int]]] = {arm: [] for arm in ARMS}

    def step(self, arm: str) -> None:
        """Train one, all ranks together, and note it."""
        self._rows.count = 0
        dist.barrier()
        start = time.perf_counter()
        self.training.step()
        self._told[arm].append((time.perf_counter() - start, self._rows.count))

    def found(self) -> dict[str, Any]:
        """Of all ranks, without the first step of each arm: seconds, imbalance, and off / on with its interval."""
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, {arm: steps[1:] for arm, steps in self._told.items()})
        steps = {arm: [*zip(*(each[arm] for each in every), strict=True)] for arm in ARMS}
        seconds = {arm: [max(rank[0] for rank in step) for step in steps[arm]] for arm in ARMS}
        ratio = paired_ratio(seconds["off"], seconds["on"])
        assert ratio is not None
        return {
            "imbalance": {arm: _imbalance(steps[arm]) for arm in ARMS},
            "seconds": {arm: statistics.median(each) for arm, each in seconds.items()},
            "ratio": ratio.words(),
        }


def _imbalance(steps: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Rows of the fullest rank over the mean."""
    rows = [sum(step[rank][1] for step in steps) for rank in range(RANKS)]
    return max(rows) * RANKS / sum(rows)


def speeds(row: dict[str, Any]) -> list[str]:
    """Cells of a row: seconds of both arms, and off / on."""
    return [*(f"{1e3 * row['seconds'][arm]:.0f} ms" for arm in ARMS), row["ratio"]]
