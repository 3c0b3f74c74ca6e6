"""Compares losses with features on and off on real text.

Trains two layers on the help texts of Python's standard library, one token per byte, in bf16 on CPU. A feature holds if
its losses stay within the rounding baseline: the largest distance from off, up to each step, of three trainings whose
initial weights were moved by one rounding each. Rows are kept as JSON next to the page, which shows all of them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Benchmark, Options, Row
from tests.harness import checkouts
from tests.harness.core_trainings import MOE, MOE_CONFIGURED, losses
from tests.harness.training import Result, Trainer

NUDGES = (1, 2, 3)

# Options of the model by feature.
DENSE: dict[str, dict[str, Any]] = {
    "reuse_fp32_param": {},
    "use_flash_attn": {},
    "use_fused_adamw": {},
    "use_fused_cross_entropy": {},
    "use_fused_embedding": {},
    "use_fused_linear_cross_entropy": {},
    "use_fused_rmsnorm": {},
    "use_fused_rotary_pos_emb": {},
    "use_fused_swiglu": {},
    "use_gradient_accumulation_fusion": {"wgrad_fusion": True},
}
# What is left to fuse in a model with biases and with the attention that makes scores.
BIASED: dict[str, dict[str, Any]] = {
    "use_bias_dropout_fusion": {},
    "use_masked_softmax_fusion": {"softmax_fusion": True},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "moe_grouped_gemm": {},
    "moe_permute_fusion": {"moe": {"moe_permute_fusion": True}},
    "moe_router_fusion": {"moe": {"moe_router_fusion": True}},
}
# With `use_fused_cross_entropy`.
NOT_TOGETHER = ("use_fused_linear_cross_entropy",)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP2: dict[str, Any] = {"tp": 2, "sp": True}
VPP: dict[str, Any] = {"pp": 2, "vpp": 2, "layers": 4}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
SHARED = {"moe": {"moe_shared_expert_intermediate_size": 64}}
# Ranks and options.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2 sp": (2, TP2),
    "pp2": (2, {"pp": 2}),
    "biases": (1, {"bias": True, "config": {"bias_dropout_fusion": True}}),
    "recompute full": (1, {"config": FULL}),
    "recompute selective": (1, {"config": {"recompute_granularity": "selective"}}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, {}),
    "experts ep2": (2, {"ep": 2}),
    "experts ep2 allgather": (2, {"ep": 2, "moe": {"moe_token_dispatcher_type": "allgather"}}),
    "experts tp2": (2, TP2),
    "experts tp2 etp1 ep2": (2, {**TP2, "etp": 1, "ep": 2}),
    "experts ep4": (4, {"ep": 4}),
    "experts dropped": (2, {"ep": 2, "moe": CAPACITY}),
    "experts padded": (2, {"ep": 2, "moe": {**CAPACITY, "moe_pad_expert_input_to_capacity": True}}),
    "experts shared": (2, {"ep": 2, **SHARED}),
}
# A sequence over several ranks against the same batch on one.
CONTEXT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    f"cp{ranks}{name}": (ranks * others, {"cp": ranks, **options})
    for ranks in (2, 4)
    for name, others, options in (
        ("", 1, {}),
        (" distributed optimizer", 1, {"distributed_optimizer": True}),
        (" tp2 sp", 2, TP2),
        (" pp2", 2, {"pp": 2}),
        (" pp2 vpp2", 2, VPP),
        (" ep2", 1, {"experts": 4, "ep": 2}),
    )
}
# Experts' exchange against the same layout without the feature.
EXCHANGE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    f"exchange ep{ranks}{name}": (ranks * others, {"ep": ranks, **options})
    for ranks in (2, 4)
    for name, others, options in (
        ("", 1, {}),
        (" tp2", 1, {**TP2, "etp": 1}),
        (" pp2", 2, {"pp": 2}),
        (" pp2 vpp2", 2, VPP),
        (" cp2", 1, {"cp": 2}),
        (" distributed optimizer", 1, {"distributed_optimizer": True, "overlap_param_gather": True}),
        *([(" shared expert", 1, SHARED), (" mtp", 1, {"config": {"mtp_num_layers": 1}})] if ranks == 2 else []),
    )
}
EVERY_LAYOUT = {**LAYOUTS, **EXPERT_LAYOUTS, **CONTEXT_LAYOUTS, **EXCHANGE_LAYOUTS}
RING, ULYSSES = {"context_parallel_algo": "megatron_cp_algo"}, {"context_parallel_algo": "ulysses_cp_algo"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ring": RING,
    "ulysses": ULYSSES,
    "gathered keys": {"context_parallel_algo": "kvallgather_cp_algo"},
    "hybrid": {"ulysses_degree_in_cp": 2},
    "double ring": {**RING, "cp_window_size": 2, "use_cp_send_recv_overlap": True},
}
# Flags and options with the feature, and options on both sides.
EXCHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "moe_fb_overlap": (
        {"moe_fb_overlap": True},
        {
            "ddp_delay_wgrad_compute": True,
            "config": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        },
        {},
    ),
    "moe_alltoall_overlap_comm": ({"moe_alltoall_overlap_comm": True}, {}, {}),
    "moe_allgather_overlap_comm": (
        {"moe_allgather_overlap_comm": True},
        {},
        {"moe": {"moe_token_dispatcher_type": "allgather"}},
    ),
    "moe_zero_memory=level1": ({"moe_zero_memory": "level1"}, {}, {}),
    "moe_hierarchical_alltoallv": ({"moe_hierarchical_alltoallv": True}, {}, {}),
}


class Job(NamedTuple):
    """One training of `tests.harness.core_loop`; without flags Megatron alone."""

    ranks: int
    options: dict[str, Any]
    flags: dict[str, Any] | None = None

    def run(self, trainer: Trainer, **more: Any) -> Result:
        given = {} if self.flags is None else {"flags": {**self.flags, "strict": True}}
        arm = "device" if self.flags is None else "features"
        return trainer.core(arm, self.ranks, {**self.options, **more}, timeout=900, **given)


Comparison = tuple[str, Job, Job]


def merged(*options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of all; a later one wins, within nested tables too."""
    found: dict[str, Any] = {}
    for each in options:
        for key, value in each.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def comparisons(layout: str, features: list[str], common: dict[str, Any]) -> Iterator[Comparison]:
    """What is trained in a layout: a name, off and on. Without `features`, all that the layout has."""
    ranks, options = EVERY_LAYOUT[layout]
    if layout in EXPERT_LAYOUTS or "experts" in options:
        # Choices of experts flip where two are nearly as good: at the rate of the others, two trainings are soon as far
        # apart as any two.
        common = merged(common, {"experts": 4, "lr": 3e-4, "moe": {"moe_router_dtype": "fp32"}})
    if layout in EXCHANGE_LAYOUTS:
        yield from _exchanges(layout, features, common)
    elif layout in CONTEXT_LAYOUTS:
        yield from _split(ranks, merged(common, options))
    else:
        given = merged(common, options)
        own = EXPERTS if layout in EXPERT_LAYOUTS else BIASED if layout == "biases" else {}
        known = {**DENSE, **own}
        alone = (
            DENSE if layout in ("single", "tp2 sp") else own if layout in ("experts", "experts ep2", "biases") else {}
        )
        for text in features or alone:
            name, _, value = text.partition("=")
            flags = {name: value or True}
            yield (
                text,
                Job(ranks, given),
                Job(ranks, merged(given, {**known, **BIASED, **EXPERTS}.get(name, {})), flags),
            )
        if not features:
            together = [name for name in known if name not in NOT_TOGETHER]
            on = merged(given, *(known[name] for name in together))
            yield "all together", Job(ranks, given), Job(ranks, on, dict.fromkeys(together, True))


def _split(ranks: int, options: dict[str, Any]) -> Iterator[Comparison]:
    """A sequence over several ranks against whole ones, on a rank with all experts."""
    cp = options["cp"]
    options = merged(options, {"by_name": True}, {"cp_hierarchy": [2, 2]} if cp == 4 else {})
    whole = {name: value for name, value in options.items() if name not in ("cp", "cp_hierarchy")}
    left_out = {"hybrid", "double ring"} if cp == 2 else {"gathered keys"}
    if ranks != 2:
        left_out.add("gathered keys")
    if options.get("tp", 1) * cp > 4:  # heads of the model
        left_out.add("ulysses")
    for name, flags in ALGORITHMS.items():
        if name not in left_out:
            off = Job(ranks // cp, {**whole, "ep": 1})
            yield name, off, Job(ranks, options, {**flags, "context_parallel_size": cp})


def _exchanges(layout: str, features: list[str], common: dict[str, Any]) -> Iterator[Comparison]:
    ranks, options = EXCHANGE_LAYOUTS[layout]
    for name in features or EXCHANGES:
        flags, with_it, always = EXCHANGES[name]
        if name == "moe_fb_overlap" and "pp" in options and "vpp" not in options:
            continue  # Megatron's combined schedule wants virtual stages.
        model = {"experts": 8, "wgrad_fusion": True, "overlap_grad_reduce": True, "lr": 3e-4, "moe": MOE_CONFIGURED}
        given = merged(common, model, options, always)
        if name == "moe_alltoall_overlap_comm" and "moe_shared_expert_intermediate_size" in given["moe"]:
            # The place of the shared expert in the order of sums.
            given = merged(given, {"moe": {"moe_shared_expert_overlap": True}})
        both: dict[str, Any] = {**MOE, "use_gradient_accumulation_fusion": True}
        if "cp" in given:
            both |= {**RING, "context_parallel_size": given["cp"]}
        if name == "moe_hierarchical_alltoallv":
            flags = {**flags, "moe_node_size": given["ep"] // 2}
        yield name, Job(ranks, given, both), Job(ranks, merged(given, with_it), {**both, **flags})


def _compared(trainer: Trainer, off: Job, on: Job) -> Row:
    """Largest relative distances, and the worst share of the baseline's largest distance up to that step."""
    first, second = off.run(trainer), on.run(trainer)
    before, after = losses(first), losses(second)
    ends = {"first": before[0], "last": before[-1], "on": after[-1]}
    if first.history() == second.history():
        return {**ends, "distance": None, "baseline": None, "share": 0.0}
    nudged = [losses(off.run(trainer, nudge=seed)) for seed in NUDGES]
    marks = [max(abs(a - b) / a for b in others) for a, *others in zip(before, *nudged, strict=True)]
    distances = [abs(a - b) / a for a, b in zip(before, after, strict=True)]
    # In the first steps both are the noise of one rounding.
    share = max(each / max(*marks[: index + 1], 2.0**-12) for index, each in enumerate(distances))
    return {**ends, "distance": max(distances), "baseline": max(marks), "share": share}


def _measure(options: Options) -> list[Row]:
    kept = options.page.with_suffix(".json") if options.page is not None else None
    rows = {_key(row): row for row in json.loads(kept.read_text())} if kept is not None and kept.is_file() else {}
    spec = importlib.util.find_spec("pydoc_data.topics")
    assert spec is not None and spec.origin is not None
    common = {"steps": options.steps, "lr": 1e-3, "text": spec.origin}
    features = [each for each in options.features if each]
    for release in options.releases:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = Trainer(checkouts.folder(release), Path(scratch), training=False)
            for layout in options.layouts:
                for name, off, on in comparisons(layout, features, common):
                    row = {"release": release, "layout": layout, "features": name, "steps": options.steps}
                    row |= _compared(trainer, off, on)
                    print(row, flush=True)
                    rows[_key(row)] = row
                    if kept is not None:
                        kept.parent.mkdir(parents=True, exist_ok=True)
                        kept.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in rows.values()) + "\n]\n")
            trainer.close()
    return worst([*rows.values()])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("release", "layout", "features", "steps"))


def worst(rows: list[Row]) -> list[Row]:
    """One row for each feature and length of training: the worst of its layouts and releases, which it lists."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["features"], row["steps"]), []).append(row)
    return [
        {
            **max(found, key=lambda row: float(row["share"])),
            "layouts": [*dict.fromkeys(row["layout"].removeprefix("exchange ") for row in found)],
            "releases": sorted({row["release"] for row in found}),
        }
        for found in groups.values()
    ]


def _share(row: Row) -> str:
    """Rounded up: what is beyond the baseline must not read as if it were within."""
    if row["distance"] is None:
        return ""
    return f"{math.ceil(100 * row['share']) / 100:.2f} ({row['layout']}, {row['release']})"


BENCHMARK = Benchmark(
    name="agreement",
    title="Losses on against off",
    about="Two layers train on the help texts of Python's standard library, one token per byte, in bf16; the baseline "
    "is the largest distance from off, up to each step, of three trainings whose initial weights were moved by one "
    "rounding each. Of each feature the worst training is shown: a share up to 1 is within the baseline.",
    columns={
        "feature": lambda row: row["features"],
        "steps": lambda row: str(row["steps"]),
        "layouts": lambda row: ", ".join(row["layouts"]),
        "Megatron": lambda row: ", ".join(row["releases"]),
        "distance": lambda row: "bitwise" if row["distance"] is None else f"{row['distance']:.1e}",
        "baseline": lambda row: "" if row["distance"] is None else f"{row['baseline']:.1e}",
        "share": _share,
    },
    measure=_measure,
    options={"steps": 100, "releases": ["0.17.1", "0.19.2"], "layouts": [*LAYOUTS, *EXPERT_LAYOUTS], "features": [""]},
    tiny={"steps": 3, "releases": ["0.19.2"], "layouts": ["single"],
          "features": ["use_fused_rmsnorm", "use_fused_embedding"]},
    choices={"releases": checkouts.ALL, "layouts": [*EVERY_LAYOUT]},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
