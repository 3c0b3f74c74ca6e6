"""Attention of two data-parallel ranks, balanced and not: `python -m benchmarks.balanced_lengths`.

    python -m benchmarks.balanced_lengths [--steps 8] [--seq-length 8192] [--micro-batches 4 12] [--heads 4]
                                          [--size 64] [--shortest 16] [--tail 1.4] [--page FILE]

Two processes, a core each, read documents of long-tailed lengths through Megatron's data sets and loaders. Each
computes the packed attention of its micro-batches, forward and backward, in fp32: the same step in Megatron's order,
which is a random one, with `--balance-sequence-lengths`, and with it for ranks that wait in each micro-batch, in turn
(A B C A B C). A step has the time of its slowest rank. Beside it stands what many steps of more ranks have by pairs of
query and key alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports, once for all ranks

import mindspeed_lite
from benchmarks import page
from lab.network import Delays
from lab.ranks import Rates, on_ranks
from mindspeed_lite.bench.statistics import paired_ratio
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.parallel.balance.lengths import (
    GeneratedLengths,
    attention_pairs,
    lower_bound,
    sample_costs,
    simulate_order,
)
from tests.harness import document_data

RANKS = 2
# Ranks and steps that are simulated.
SIMULATED, SIMULATED_STEPS = (2, 4, 8), 100
# Name -> expert-model-parallel size of the run, or None without the feature.
ARMS: dict[str, int | None] = {"in order": None, "balanced": 1, "balanced for waits": RANKS}


def _arguments(options: argparse.Namespace, experts: int | None) -> SimpleNamespace:
    """What Megatron's loaders and the feature read of a script's arguments."""
    return SimpleNamespace(
        dataloader_inter_document_masking=True,
        dataloader_type="single",
        data_parallel_size=RANKS,
        micro_batch_size=1,
        global_batch_size=RANKS * options.micro_batches,
        expert_model_parallel_size=experts or 1,
        hybrid_context_parallel=False,
        num_workers=0,
        full_validation=False,
        exit_signal_handler=False,
    )


def _lengths(options: argparse.Namespace) -> GeneratedLengths:
    return GeneratedLengths(options.shortest, options.tail, options.seq_length)


def _training_set(options: argparse.Namespace, folder: str) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prefix = Path(folder, "data")
    samples = (options.steps + 1) * RANKS * options.micro_batches
    if dist.get_rank() == 0:
        lengths = _lengths(options)
        # By the mean of a Pareto distribution; documents that are cut and a long tail make the sum fall below it.
        mean = options.shortest * options.tail / (options.tail - 1)
        document_data.write(prefix, int(3 * samples * options.seq_length / mean), lengths)
    dist.barrier()
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=options.seq_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(Path(folder, "cache")),
        tokenizer=SimpleNamespace(eod=255, pad=-1, vocab_size=256, unique_identifiers={"class": "none"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


class _Attention:
    """Packed attention of one micro-batch, timed."""

    def __init__(self, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = options.seq_length, options.heads, options.size
        self.q, self.k, self.v, self.dout = (torch.randn(shape, generator=generator) for _ in range(4))
        self.leaves = [each.requires_grad_() for each in (self.q, self.k, self.v)]

    def seconds(self, batch: Any) -> tuple[float, int]:
        """Seconds of forward and backward pass, and the pairs of query and key."""
        ends = batch["cu_seqlens"][0].unique()
        start = time.perf_counter()
        q, k, v = self.leaves
        out = packed.attention(q, k, v, packed.Packing.of(ends), causal=True)
        torch.autograd.grad(out, self.leaves, self.dout)
        return time.perf_counter() - start, attention_pairs(ends.diff().tolist())


def _rank(options: argparse.Namespace, folder: str, rates: Rates) -> dict[str, Any]:
    """{arm: [steps][micro-batches][ranks] of (seconds, pairs)}"""
    from megatron.core import parallel_state
    from megatron.training import global_vars
    from megatron.training.datasets import data_samplers

    from mindspeed_lite import platform

    logging.getLogger("megatron").setLevel(logging.WARNING)
    platform.activate()
    parallel_state.initialize_model_parallel()
    data, attention, loaders = _training_set(options, folder), _Attention(options), {}
    for name, experts in ARMS.items():
        given = _arguments(options, experts)
        global_vars.unset_global_variables()
        global_vars.set_args(given)
        flags = {"host_args": given, "balance_sequence_lengths": experts is not None, "strict": True}
        with mindspeed_lite.enabled(**flags):
            loaders[name] = iter(data_samplers.build_pretraining_data_loader(data, 0))
    found: dict[str, Any] = {name: [] for name in ARMS}
    for step in range(options.steps + 1):
        for name, loader in loaders.items():
            batches = [next(loader) for _ in range(options.micro_batches)]
            dist.barrier()
            # The first step warms up.
            own = [attention.seconds(each) for each in batches[: options.micro_batches if step else 2]]
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, own)
            if step:
                found[name].append(list(zip(*every, strict=True)))
    return found


def _slowest(steps: Sequence[Any], what: int) -> list[float]:
    """[steps], of the rank that takes longest."""
    return [max(sum(each[what] for each in rank) for rank in zip(*step, strict=True)) for step in steps]


def _waited(steps: Sequence[Any], what: int) -> list[float]:
    """[steps], where ranks wait for each other in every micro-batch."""
    return [sum(max(each[what] for each in row) for row in step) for step in steps]


def _page(options: argparse.Namespace, command: str, parts: Sequence[str]) -> str:
    lines = [
        "# Attention of data-parallel ranks, balanced",
        "",
        f"Documents from a Pareto distribution (shortest {options.shortest} tokens, exponent {options.tail}, cut at "
        f"{options.seq_length}), packed into samples of {options.seq_length} tokens, one in each micro-batch; {RANKS} "
        f"ranks with a core each; {options.heads} heads of {options.size}, fp32, forward and backward. *By pairs* is "
        "what the lengths predict. Megatron's order is a random one.",
        "",
        f"`{command}`, CPU with {os.cpu_count()} cores.",
        *parts,
    ]
    return "\n".join(lines) + "\n"


def _part(options: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """What was measured and simulated with one number of micro-batches."""
    lines = [
        "",
        f"## {options.micro_batches} micro-batches of each rank",
        "",
        f"{options.steps} steps on {RANKS} ranks:",
        "",
        f"| Ranks wait | Order | slowest of {RANKS} ranks' attention | over random (95 % interval) | by pairs "
        "| above the lower bound |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for wait, of, arm in (("at the end of a step", _slowest, "balanced"),
                          ("in each micro-batch", _waited, "balanced for waits")):  # fmt: skip
        bounds = []
        for step in found[arm]:
            units = [seconds for row in step for seconds, _ in row]
            rows = sorted(units, reverse=True)[::RANKS]
            bounds.append(lower_bound(units, RANKS) if of is _slowest else sum(rows))
        for name in ("in order", arm):
            seconds = of(found[name], 0)
            ratio = paired_ratio(of(found["in order"], 0), seconds)
            assert ratio is not None
            pairs = sum(of(found["in order"], 1)) / sum(of(found[name], 1))
            above = f"{100 * (sum(seconds) / sum(bounds) - 1):.1f} %"
            faster = ("1", "1", above) if name != arm else (ratio.words(), f"{pairs:.2f}", above)
            lines.append(f"| {wait} | {name} | {sum(seconds) / len(seconds):.2f} s a step | {' | '.join(faster)} |")
    return [*lines, *_simulated(options)]


def _simulated(options: argparse.Namespace) -> list[str]:
    """What the same documents come to over many steps and more ranks, by pairs."""
    lines = [
        "",
        f"By pairs alone, {SIMULATED_STEPS} steps (`mindspeed-lite balance --generate-lengths`):",
        "",
        "| Ranks | Ranks wait | over random | random order above the lower bound | balanced above it |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ranks in SIMULATED:
        step = ranks * options.micro_batches
        costs = sample_costs(_lengths(options).draw(), options.seq_length, SIMULATED_STEPS * step, 1234)
        random, balanced, waiting, bound = simulate_order(costs, ranks, step)
        for wait, slowest, after, least in (
            ("at the end of a step", random.step, balanced.step, bound.step),
            ("in each micro-batch", random.micro_batch, waiting.micro_batch, bound.micro_batch),
        ):
            above = (f"{100 * (each / least - 1):.1f} %" for each in (slowest, after))
            lines.append(f"| {ranks} | {wait} | {slowest / after:.2f} | {' | '.join(above)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balanced_lengths")
    parser.add_argument("--steps", type=int, default=8, help="with the most micro-batches; more with fewer")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 12], metavar="N", help="of a rank and step")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest document")
    parser.add_argument("--tail", type=float, default=1.4, help="exponent of the Pareto distribution")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    if min(options.micro_batches) < 2:
        parser.error("--micro-batches: with one there is nothing to exchange")
    parts: list[str] = []
    for count in options.micro_batches:
        steps = options.steps * max(options.micro_batches) // count
        given = argparse.Namespace(**{**vars(options), "micro_batches": count, "steps": steps})
        with tempfile.TemporaryDirectory() as folder:
            parts += _part(given, on_ranks(RANKS, Delays(), partial(_rank, given, folder)))
    page.write(options, _page(options, page.command("balanced_lengths", arguments), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
