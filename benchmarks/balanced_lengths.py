"""Attention of two data-parallel ranks, with and without `--balance-sequence-lengths`.

Documents of long-tailed lengths come through Megatron's data sets and loaders; each rank computes the packed attention
of its micro-batches, forward and backward. A step has the time of its slowest rank.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports, once for all ranks

import mindspeed_lite
from benchmarks.harness import Benchmark, Options, Row
from lab.ranks import Rates, gathered, on_ranks, ratio_in_words, use_device_layer
from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.parallel.balance.lengths import attention_pairs
from tests.harness import document_data

RANKS = 2
# Expert-model-parallel size of the run, or None without the feature. Experts make ranks wait in each micro-batch.
ARMS: dict[str, int | None] = {"random": None, "a step": 1, "a micro-batch": RANKS}
# [micro-batches][ranks] of (seconds, pairs of query and key)
Step = Sequence[Sequence[tuple[float, int]]]


def _arguments(micro_batches: int, experts: int | None) -> SimpleNamespace:
    """What Megatron's loaders and the feature read of a script's arguments."""
    return SimpleNamespace(
        dataloader_inter_document_masking=True, dataloader_type="single", data_parallel_size=RANKS, micro_batch_size=1,
        global_batch_size=RANKS * micro_batches, expert_model_parallel_size=experts or 1,
        hybrid_context_parallel=False, num_workers=0, full_validation=False, exit_signal_handler=False,
    )  # fmt: skip


def _training_set(options: Options, micro_batches: int, folder: str) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    prefix, samples = Path(folder, "data"), (options.steps + 1) * RANKS * micro_batches
    if dist.get_rank() == 0:
        lengths = document_data.GeneratedLengths(options.shortest, options.tail, options.seq_length)
        # By the mean of a Pareto distribution; documents that are cut and a long tail make the sum fall below it.
        mean = options.shortest * options.tail / (options.tail - 1)
        document_data.write(prefix, int(3 * samples * options.seq_length / mean), lengths)
    dist.barrier()
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=options.seq_length, blend=([str(prefix)], None), split="1,0,0",
        path_to_cache=str(Path(folder, "cache")), reset_position_ids=False, reset_attention_mask=False,
        tokenizer=SimpleNamespace(eod=255, pad=-1, vocab_size=256, unique_identifiers={"class": "none"}),
        eod_mask_loss=False, create_attention_mask=False, inter_document_masking=True,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def _attention(options: Options) -> Callable[[Any], tuple[float, int]]:
    """Runs the packed attention of one micro-batch; returns its seconds and its pairs of query and key."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    *leaves, dout = (torch.randn(options.seq_length, options.heads, options.size, generator=generator) for _ in "qkvd")
    q, k, v = (each.requires_grad_() for each in leaves)

    def run(batch: Any) -> tuple[float, int]:
        ends = batch["cu_seqlens"][0].unique()
        start = time.perf_counter()
        out = packed.attention(q, k, v, packed.Packing.of(ends), causal=True)
        torch.autograd.grad(out, (q, k, v), dout)
        return time.perf_counter() - start, attention_pairs(ends.diff().tolist())

    return run


def _steps(options: Options, micro_batches: int, folder: str, rates: Rates) -> dict[str, list[Step]]:
    from megatron.core import parallel_state
    from megatron.training import global_vars
    from megatron.training.datasets import data_samplers

    use_device_layer()
    parallel_state.initialize_model_parallel()
    data, attention, loaders = _training_set(options, micro_batches, folder), _attention(options), {}
    for name, experts in ARMS.items():
        given = _arguments(micro_batches, experts)
        global_vars.unset_global_variables()
        global_vars.set_args(given)
        with mindspeed_lite.enabled(host_args=given, balance_sequence_lengths=experts is not None, strict=True):
            loaders[name] = iter(data_samplers.build_pretraining_data_loader(data, 0))
    found: dict[str, list[Step]] = {name: [] for name in ARMS}
    for step in range(options.steps + 1):
        for name, loader in loaders.items():
            batches = [next(loader) for _ in range(micro_batches)]
            dist.barrier()
            every = gathered([attention(each) for each in batches])
            if step:  # the first one warms up
                found[name].append([*zip(*every, strict=True)])
    return found


def _slowest(step: Step, what: Literal[0, 1]) -> float:
    """Of the rank that takes longest."""
    return float(max(sum(each[what] for each in rank) for rank in zip(*step, strict=True)))


def _waited(step: Step, what: Literal[0, 1]) -> float:
    """Where ranks wait for each other in every micro-batch."""
    return sum(max(each[what] for each in row) for row in step)


def _measure(options: Options) -> list[Row]:
    rows = []
    for micro_batches in options.micro_batches:
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(RANKS, partial(_steps, options, micro_batches, folder))
        for wait, time_of in (("a step", _slowest), ("a micro-batch", _waited)):
            before, after = ([time_of(step, 0) for step in found[arm]] for arm in ("random", wait))
            off, on = (sum(time_of(step, 1) for step in found[arm]) for arm in ("random", wait))
            times = {"off": fmean(before), "on": fmean(after)}
            row = {"micro-batches": micro_batches, "wait": wait, "seconds": times, "pairs": off / on}
            rows.append({**row, "ratio": ratio_in_words(before, after)})
    return rows


BENCHMARK = Benchmark(
    name="balanced_lengths",
    title="Attention of data-parallel ranks, balanced",
    about="Documents from a Pareto distribution (shortest {shortest} tokens, exponent {tail}) in samples of "
    "{seq_length} tokens, {heads} heads of {size}, fp32, two ranks with a core each. {steps} steps in Megatron's "
    "random order and balanced, in turn.",
    columns={
        "micro-batches of a rank": lambda row: str(row["micro-batches"]),
        "ranks wait at the end of": lambda row: row["wait"],
        "random": lambda row: seconds(row["seconds"]["off"]),
        "balanced": lambda row: seconds(row["seconds"]["on"]),
        "faster": lambda row: row["ratio"],
        "by pairs": lambda row: f"{row['pairs']:.2f}",
    },
    measure=_measure,
    options={"steps": 8, "seq_length": 8192, "micro_batches": [4, 12], "heads": 4, "size": 64, "shortest": 16,
             "tail": 1.4},
    tiny={"steps": 2, "seq_length": 256, "micro_batches": [2], "heads": 2, "size": 16},
    note="*by pairs*: what the lengths predict, by pairs of query and key.",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
