"""Trainings of the core loop without and with features: a layout in words, features as flags, and how near they are.

    Rows("experts", {"ep2": "0.19.2", "ep2 tp2 sp etp1": ""}, on="moe_grouped_gemm", base="experts4", near=DRIFT)

is two layouts, each trained without and with `moe_grouped_gemm`; the first one runs in `make test`, on one release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.pipeline import trace
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Schedule
from tests.harness import checkouts, core_loop, matrix, training
from tests.harness.checkouts import ROOT
from tests.harness.training import Result, Trainer, fault

NEW = checkouts.ALL[-1]
DENSE = (
    "use_flash_attn use_fused_adamw use_fused_cross_entropy use_fused_embedding use_fused_rmsnorm "
    "use_fused_rotary_pos_emb use_fused_swiglu use_gradient_accumulation_fusion"
)
WGRAD = "use_gradient_accumulation_fusion"
EXPERTS = "moe_grouped_gemm moe_permute_fusion moe_router_fusion"

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BLOCK = {**_FULL, "recompute_method": "block"}


def _again(*modules: str) -> dict[str, Any]:
    return {"config": {"recompute_granularity": "selective", "recompute_modules": [*modules]}}


# Options of `core_loop` by the word that a layout has for them; a word with a number sets the option of that name.
_SIZES = {"micro": "micro_batches", "bucket": "bucket_size"}
WORDS: dict[str, dict[str, Any]] = {
    **{
        name: {name: True} for name in ("sp", "tied", "bias", "fp32", "no_sync", "by_name", "mask_tensor", "qk_l2_norm")
    },
    "bf16": {"fp32": False},
    "dropout": {"dropout": 0.1},
    "wgrad": {"wgrad_fusion": True},
    "no_wgrad": {"wgrad_fusion": False},
    "softmax": {"softmax_fusion": True},
    "bits": {"digest": True, "evaluate": True},
    "digest": {"digest": True},
    # Two more steps after `disable`.
    "undone": {"undone": True},
    "unclipped": {"clip_grad": 1e9},
    "text": {"text": str(ROOT / "LICENSE")},
    "slow": {"lr": 1e-3},
    "te": {"transformer_engine": True},
    "grouped": {"moe": {"moe_grouped_gemm": True}},
    "gqa": {"query_groups": 2},
    "qk_norm": {"qk_layernorm": True},
    "layernorm": {"config": {"normalization": "LayerNorm"}},
    "grads16": {"grad_reduce_in_fp32": False},
    "documents": {"packed": "documents"},
    "padded_documents": {"packed": "padded"},
    "dist": {"distributed_optimizer": True},
    "overlap_grad": {"overlap_grad_reduce": True},
    "overlap_gather": {"overlap_param_gather": True},
    "align_gather": {"align_param_gather": True},
    "sync": {"distributed_optimizer": True, "overlap_grad_reduce": True, "sync_functions": True},
    "sums": {"config": {"bias_dropout_fusion": True}},
    "zero_centred": {"config": {"layernorm_zero_centered_gamma": True}},
    "per_token": {"config": {"calculate_per_token_loss": True}},
    # Before 0.16 the scale has no default.
    "mtp": {"config": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}},
    "full": {"config": _FULL},
    "full_block": {"config": _BLOCK},
    "full_block3": {"config": {**_BLOCK, "recompute_num_layers": 3}},
    "full_block_some": {"config": {**_BLOCK, "num_microbatches_with_partial_activation_checkpoints": 1}},
    "again_attention": _again("core_attn"),
    "again_experts": _again("moe"),
    "again_activation": {"moe": {"moe_grouped_gemm": True}, **_again("moe_act")},
    "lengths": {"config": {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}},
    "outputs_released": {"config": {"deallocate_pipeline_outputs": True}},
    "groups_of_3": {"config": {"microbatch_group_size_per_vp_stage": 3}},
    "messages_whole": {"config": {"overlap_p2p_comm": False, "batch_p2p_comm": True}},
    # Experts.
    "router_fp32": {"moe": {"moe_router_dtype": "fp32"}},
    "permute_fused": {"moe": {"moe_permute_fusion": True}},
    "moe_fused": {"moe": {"moe_permute_fusion": True, "moe_router_fusion": True, "moe_router_dtype": "fp32"}},
    "router_bf16": {"moe": {"moe_router_dtype": None, "moe_router_fusion": False}},
    "allgather": {"moe": {"moe_token_dispatcher_type": "allgather"}},
    "dropped": {"moe": {"moe_expert_capacity_factor": 1.0}},
    "padded": {"moe": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}},
    "shared": {"moe": {"moe_shared_expert_intermediate_size": 64}},
    "shared_overlap": {"moe": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}},
    "sigmoid": {"moe": {"moe_router_score_function": "sigmoid"}},
    "groups": {
        "moe": {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_dtype": "fp32",
        }
    },
    "bias_of_experts": {
        "moe": {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_load_balancing_type": "none",
        }
    },
    "unbalanced": {"moe": {"moe_router_load_balancing_type": "none"}},
    "pre_softmax": {"moe": {"moe_router_pre_softmax": True, "moe_z_loss_coeff": 1e-3}},
    "first_dense": {"moe": {"moe_layer_freq": [0, 1]}},
    **{f"top{k}": {"moe": {"moe_router_topk": k, "moe_router_pre_softmax": k == 1}} for k in (1, 5, 8)},
    "combined": {"config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": False}},
    "delayed": {"ddp_delay_wgrad_compute": True, "config": {"delay_wgrad_compute": True}},
    "ddp_delayed": {"ddp_delay_wgrad_compute": True},
    # What runs in both trainings before features are on (`tests.harness.simulated`).
    "idle_rank": {"before": "idle_rank"},
    "skewed": {"before": "skewed_router"},
}


def options_of(layout: str) -> dict[str, Any]:
    """Options of `core_loop` for the words of a layout; later ones win."""
    found: dict[str, Any] = {}
    for word in layout.split():
        sized = re.fullmatch(r"([a-z]+)(\d+)", word)
        given = WORDS[word] if word in WORDS or not sized else {_SIZES.get(sized[1], sized[1]): int(sized[2])}
        for name, value in given.items():
            found[name] = {**found.get(name, {}), **value} if isinstance(value, dict) else value
    return found


def ranks_of(options: Mapping[str, Any]) -> int:
    """How many ranks a layout takes: `dp` replicas of what holds all of the model, experts or the rest."""
    tp, pp, cp, ep = (options.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    ranks: int = options.get("dp", 1) * pp * max(tp * cp, options.get("etp", tp) * ep)
    return ranks


def flags_of(text: str) -> dict[str, Any]:
    """Keywords of `enable`: `name` is True, `name=value` a number or a text, `name=[value]` a list."""
    found: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if value.startswith("["):
            found[name] = value[1:-1].split(",")
        elif number := re.fullmatch(r"(\d+)|\d+\.\d+", value):
            found[name] = int(value) if number[1] else float(value)
        else:
            found[name] = value or True
    return found


class Near(NamedTuple):
    """How far losses, the first gradient norm, and later ones may be apart, relative to their size."""

    loss: float = training.DRIFT
    first_norm: float = training.FIRST_NORM
    norm: float = training.NORM_DRIFT


# Kernels that round otherwise, in bf16.
DRIFT = Near()


@dataclass(frozen=True)
class Rows:
    """Features in layouts; `layouts` says for each on which releases `make test` trains it."""

    name: str
    layouts: dict[str, str]
    on: str = ""
    # Features of both trainings, words of all layouts, and words of the training with the features.
    both: str = ""
    base: str = ""
    more: str = ""
    # The layout of the training without them, if another.
    reference: str | None = None
    # None: bit for bit, on all ranks.
    near: Near | None = None
    # The rank with the losses: the last, or the first in a V.
    rank: int = -1
    steps: int = 3
    # By how much the loss must fall.
    learns: float = 0.0
    # Of `tests.harness.simulated`, in the training with the features, and what each rank must have logged then.
    before: str = ""
    seen: tuple[str, ...] = ()
    unseen: str = "RNG state changed"
    # The order of the pipeline that must have been executed.
    order: Callable[[PipelineShape], Schedule] | None = None
    check: Callable[[Result, Result], None] | None = None
    releases: Sequence[str] = checkouts.ALL
    absent: tuple[tuple[str, str], ...] = ()


def parameters(table: Sequence[Rows]) -> list[Any]:
    """`release, rows, layout` for pytest; what `make test` leaves out is marked."""
    return [
        pytest.param(
            release,
            rows,
            layout,
            id=f"{release}-{rows.name}-{layout or 'single'}",
            marks=() if release in quick.split() else matrix.whole,
        )
        for rows in table
        for layout, quick in rows.layouts.items()
        for release in rows.releases
        if (release, layout) not in rows.absent
    ]


def check(trainer: Trainer, rows: Rows, layout: str, folder: Path) -> None:
    """Train without and with the features, and compare."""
    words = f"{rows.base} {layout}"
    options = options_of(words) if rows.reference is None else options_of(rows.reference)
    off = _train(trainer, options, rows.both, rows.steps)
    options = options_of(f"{words} {rows.more}")
    traced = f" pipeline_schedule_trace={folder}" if rows.order else ""
    on = _train(trainer, options, f"{rows.both} {rows.on}{traced}", rows.steps, rows.before)

    if rows.near is None:
        assert on.histories() == off.histories()
    else:
        assert fault(off.steps(rows.rank), on.steps(rows.rank), *rows.near) == ""
    found = off.losses(rows.rank)
    steps = rows.steps + 2 * options.get("undone", False)
    assert len(found) == steps and (found[0] - found[-1] > rows.learns or not rows.learns), found
    if options.get("digest"):
        assert "gradients" in dict(on.history(0))
    operators = set.union(*(on.operators(rank) for rank in range(len(on.codes))))
    for feature in runtime.catalogue():
        # The embedding's operator is for weights that are split.
        may_idle = feature.name == "use_fused_embedding" and "tp" not in options
        if feature.operators and feature.options[0].dest in flags_of(rows.on) and not may_idle:
            assert operators & {*feature.operators}, f"{feature.name} was not in force"
    for rank in range(len(on.codes)):
        assert rows.unseen not in on.log(rank)
        assert all(text in on.log(rank) for text in rows.seen), f"rank {rank} did not log all of {rows.seen}"
    if rows.order is not None:
        shape = PipelineShape(options["pp"], core_loop.micro_batches(options), options.get("vpp", 1))
        assert len(trace.training_steps(trace.read(folder), rows.order(shape))) == rows.steps
    if rows.check is not None:
        rows.check(off, on)


def _train(trainer: Trainer, options: dict[str, Any], flags: str, steps: int, before: str = "") -> Result:
    options = {"steps": steps, **options}
    before = f"{options.pop('before', '')} {before}".strip()
    nproc = ranks_of(options)
    job: dict[str, Any] = {"before": before} if before else {}
    if flags.strip():
        job |= {"flags": {"strict": True, **flags_of(flags)}}
    return trainer.core("features" if "flags" in job else "device", nproc, options, timeout=900, **job)
