"""Compares losses with features on and off on real text: `python -m benchmarks.agreement`.

    python -m benchmarks.agreement [--steps 100] [--releases 0.17.1 0.19.2] [--layouts single experts ...]
                                   [--features reuse_fp32_param quant_states=bf16 ...]

Trains two layers on the help texts of Python's standard library, one token per byte, in bf16 on CPU. A feature holds if
its losses stay within the rounding baseline: the largest distance from off, up to each step, of three trainings whose
initial weights were moved by one rounding each. Results go to docs/benchmarks/agreement.json, the page is made of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import checkouts
from tests.harness.checkouts import ROOT
from tests.harness.rows import WORDS
from tests.harness.training import Trainer

RESULTS = ROOT / "docs" / "benchmarks" / "agreement.json"
ALLOWED = 1.0
NUDGES = (1, 2, 3)

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
# They exclude each other.
NOT_TOGETHER = ("use_fused_linear_cross_entropy",)
SINGLE: tuple[int, dict[str, Any]] = (1, {})
TENSOR: tuple[int, dict[str, Any]] = (2, {"tp": 2, "sp": True})
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": SINGLE,
    "tp2 sp": TENSOR,
    "pp2": (2, {"pp": 2}),
    "biases": (1, {"bias": True, "config": {"bias_dropout_fusion": True}}),
    "recompute full": (1, {"config": FULL}),
    "recompute selective": (1, {"config": {"recompute_granularity": "selective"}}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, {"experts": 4}),
    "experts ep2": (2, {"experts": 4, "ep": 2}),
    "experts ep2 allgather": (2, {"experts": 4, "ep": 2, "moe": {"moe_token_dispatcher_type": "allgather"}}),
    "experts tp2": (2, {"experts": 4, "tp": 2, "sp": True}),
    "experts tp2 etp1 ep2": (2, {"experts": 4, "tp": 2, "sp": True, "etp": 1, "ep": 2}),
    "experts ep4": (4, {"experts": 4, "ep": 4}),
    "experts dropped": (2, {"experts": 4, "ep": 2, "moe": {"moe_expert_capacity_factor": 1.0}}),
    "experts padded": (
        2,
        {"experts": 4, "ep": 2, "moe": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}},
    ),
    "experts shared": (2, {"experts": 4, "ep": 2, "moe": {"moe_shared_expert_intermediate_size": 64}}),
}
RING, ULYSSES = {"context_parallel_algo": "megatron_cp_algo"}, {"context_parallel_algo": "ulysses_cp_algo"}
GATHERED, HYBRID = {"context_parallel_algo": "kvallgather_cp_algo"}, {"ulysses_degree_in_cp": 2}
DOUBLE = {**RING, "cp_window_size": 2, "use_cp_send_recv_overlap": True}
VPP = {"pp": 2, "vpp": 2, "layers": 4}
# Of the model that is trained.
HEADS = 4
# A sequence over several ranks beside the same batch on one.
CONTEXT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "cp2 distributed optimizer": (2, {"cp": 2, "distributed_optimizer": True}),
    "cp4 distributed optimizer": (4, {"cp": 4, "distributed_optimizer": True}),
    "cp2 tp2 sp": (4, {"cp": 2, "tp": 2, "sp": True}),
    "cp4 tp2 sp": (8, {"cp": 4, "tp": 2, "sp": True}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "cp4 pp2": (8, {"cp": 4, "pp": 2}),
    "cp2 pp2 vpp2": (4, {"cp": 2, **VPP}),
    "cp4 pp2 vpp2": (8, {"cp": 4, **VPP}),
    "cp2 ep2": (2, {"cp": 2, "experts": 4, "ep": 2}),
    "cp4 ep2": (4, {"cp": 4, "experts": 4, "ep": 2}),
}
DISTRIBUTED = {"distributed_optimizer": True, "overlap_param_gather": True}
WHOLE_EXPERTS = {"tp": 2, "sp": True, "etp": 1}
SHARED_EXPERT = {"moe": {"moe_shared_expert_intermediate_size": 64}}
# Experts' tokens on their way, beside the same layout without the feature.
EXCHANGE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "exchange ep2": (2, {"ep": 2}),
    "exchange ep4": (4, {"ep": 4}),
    "exchange ep2 tp2": (2, {"ep": 2, **WHOLE_EXPERTS}),
    "exchange ep4 tp2": (4, {"ep": 4, **WHOLE_EXPERTS}),
    "exchange ep2 pp2": (4, {"ep": 2, "pp": 2}),
    "exchange ep4 pp2": (8, {"ep": 4, "pp": 2}),
    "exchange ep2 pp2 vpp2": (4, {"ep": 2, **VPP}),
    "exchange ep4 pp2 vpp2": (8, {"ep": 4, **VPP}),
    "exchange ep2 cp2": (2, {"ep": 2, "cp": 2}),
    "exchange ep4 cp2": (4, {"ep": 4, "cp": 2}),
    "exchange ep2 distributed optimizer": (2, {"ep": 2, **DISTRIBUTED}),
    "exchange ep4 distributed optimizer": (4, {"ep": 4, **DISTRIBUTED}),
    "exchange ep2 shared expert": (2, {"ep": 2, **SHARED_EXPERT}),
    "exchange ep2 mtp": (2, {"ep": 2, "config": {"mtp_num_layers": 1}}),
}
# Flags with the feature, options with it, and those on both sides.
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
EVERY_LAYOUT = {**LAYOUTS, **EXPERT_LAYOUTS, **CONTEXT_LAYOUTS, **EXCHANGE_LAYOUTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the page, and return 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--releases", nargs="+", default=["0.17.1", "0.19.2"], choices=checkouts.ALL)
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[*LAYOUTS, *EXPERT_LAYOUTS],
        choices=[*EVERY_LAYOUT],
        metavar="LAYOUT",
        help=f"of {', '.join(EVERY_LAYOUT)}; single and experts, which have the baselines, come with the others",
    )
    parser.add_argument(
        "--features", nargs="+", default=[], metavar="FEATURE[=VALUE]", help="these alone, in each layout"
    )
    options = parser.parse_args(arguments)
    rows = {_key(row): row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    failed = False
    for release in options.releases:
        for row in _measure(release, options.steps, _chosen(options.layouts), options.features):
            row = {"release": release, "steps": options.steps, **row}
            print(_line(row), flush=True)
            failed = failed or row["share"] > ALLOWED
            rows[_key(row)] = row
            RESULTS.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in rows.values()) + "\n]\n")
            RESULTS.with_suffix(".md").write_text(page_of([*rows.values()]))
    return int(failed)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("release", "layout", "features", "steps"))


def _chosen(names: Sequence[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    """The layouts of these names, behind those of their rounding baselines."""
    baselines = {
        "experts" if "experts" in EVERY_LAYOUT[name][1] else "single"
        for name in names
        if name not in (*CONTEXT_LAYOUTS, *EXCHANGE_LAYOUTS)
    }
    return {name: layout for name, layout in EVERY_LAYOUT.items() if name in baselines | set(names)}


def _measure(
    release: str, steps: int, layouts: Mapping[str, tuple[int, dict[str, Any]]], features: Sequence[str]
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(checkouts.folder(release), Path(scratch), training=False)
        text = _text(Path(scratch))
        baseline: list[float] = []
        for layout, (nproc, options) in layouts.items():
            options = {"steps": steps, "lr": 1e-3, "text": text, **options}
            if layout in EXCHANGE_LAYOUTS:
                for row in _exchanged(trainer, nproc, options, features):
                    yield {"layout": layout, **row}
                continue
            if "experts" in options:
                # Choices of experts flip where two are nearly as good: at the rate of the others, two trainings are
                # soon as far apart as any two, and nothing is compared any more.
                options["lr"] = 3e-4
                options["moe"] = {"moe_router_dtype": "fp32", **options.get("moe", {})}
            if layout in CONTEXT_LAYOUTS:
                for row in _split(trainer, nproc, options):
                    yield {"layout": layout, **row}
                continue
            off = _losses(trainer.core("device", nproc, options, timeout=900))
            own = layout in ("single", "experts")
            if own:
                baseline = _rounding_baseline(trainer, nproc, options, off)
            marks = baseline
            for name, flags, more in _named(features) if features else _arms(layout):
                moe = {**options.get("moe", {}), **more.get("moe", {})}
                given = {**options, **more, **({"moe": moe} if moe else {})}
                on = _losses(trainer.core("features", nproc, given, flags={**flags, "strict": True}, timeout=900))
                if not own and _compared(off, on, marks)["share"] > ALLOWED:
                    own, marks = True, _rounding_baseline(trainer, nproc, options, off)
                yield {"layout": layout, "features": name, **_compared(off, on, marks)}
        trainer.close()


def _split(trainer: Trainer, nproc: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Trainings with a sequence over several ranks beside the one with whole sequences, which has all experts."""
    options = {**options, "by_name": True}
    ranks = options.pop("cp")
    whole = {**options, "ep": 1}
    off = _losses(trainer.core("device", nproc // ranks, whole, timeout=900))
    marks = _rounding_baseline(trainer, nproc // ranks, whole, off)
    algorithms: dict[str, dict[str, Any]] = {"ring": RING}
    if options.get("tp", 1) * ranks <= HEADS:
        algorithms["ulysses"] = ULYSSES
    if ranks == 4:
        algorithms |= {"hybrid": HYBRID, "double ring": DOUBLE}
        options["cp_hierarchy"] = [2, 2]
    elif nproc == 2:
        algorithms["gathered keys"] = GATHERED
    for name, flags in algorithms.items():
        given = {**flags, "context_parallel_size": ranks, "strict": True}
        on = _losses(trainer.core("features", nproc, {**options, "cp": ranks}, flags=given, timeout=900))
        yield {"features": name, **_compared(off, on, marks)}


def _exchanged(
    trainer: Trainer, nproc: int, options: dict[str, Any], features: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Trainings with another exchange of experts' tokens beside the same without it."""
    for name in features or EXCHANGES:
        flags, with_it, always = EXCHANGES[name]
        if name == "moe_fb_overlap" and "pp" in options and "vpp" not in options:
            continue  # Megatron's combined schedule wants virtual stages.
        given = _merged({"experts": 8, "wgrad_fusion": True, "overlap_grad_reduce": True}, options, always)
        given = _merged({**given, "lr": 3e-4}, WORDS["moe_fused"])
        if name == "moe_alltoall_overlap_comm" and "moe_shared_expert_intermediate_size" in given["moe"]:
            # The place of the shared expert in the order of sums.
            given = _merged(given, {"moe": {"moe_shared_expert_overlap": True}})
        common: dict[str, Any] = {name: True for name in (*EXPERTS, "use_gradient_accumulation_fusion", "strict")}
        if "cp" in given:
            common |= {**RING, "context_parallel_size": given["cp"]}
        if name == "moe_hierarchical_alltoallv":
            flags = {**flags, "moe_node_size": given["ep"] // 2}
        off = trainer.core("features", nproc, given, flags=common, timeout=900)
        on = trainer.core("features", nproc, _merged(given, with_it), flags={**common, **flags}, timeout=900)
        marks = None
        if on.history() != off.history():
            marks = _rounding_baseline(trainer, nproc, given, _losses(off), flags=common)
        yield {"features": name, **_compared(_losses(off), _losses(on), marks)}


def _merged(*options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in options:
        for key, value in each.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def _rounding_baseline(
    trainer: Trainer, nproc: int, options: dict[str, Any], off: list[float], flags: dict[str, Any] | None = None
) -> list[float]:
    """After each step the largest distance from off of a training from weights that are moved by a rounding."""
    arm, given = ("device", {}) if flags is None else ("features", {"flags": flags})
    nudged = [_losses(trainer.core(arm, nproc, {**options, "nudge": seed}, timeout=900, **given)) for seed in NUDGES]
    return [max(abs(a - b) / a for b in others) for a, *others in zip(off, *nudged, strict=True)]


def _named(features: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, flags and options of trainings with one feature each, which may have a value."""
    for text in features:
        name, _, value = text.partition("=")
        yield text, {name: value or True}, {**DENSE, **BIASED, **EXPERTS}.get(name, {})


def _arms(layout: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, flags and options of each training with features on."""
    own = EXPERTS if layout in EXPERT_LAYOUTS else BIASED if layout == "biases" else {}
    known = {**DENSE, **own}
    alone = DENSE if layout in ("single", "tp2 sp") else own if layout in ("biases", "experts", "experts ep2") else {}
    for name, options in alone.items():
        yield name, {name: True}, options
    together = [name for name in known if name not in NOT_TOGETHER]
    yield "all together", dict.fromkeys(together, True), _merged(*(known[name] for name in together))


def _compared(off: list[float], on: list[float], marks: list[float] | None) -> dict[str, Any]:
    """Largest relative distances, and the worst share of the baseline's largest distance up to that step.

    marks: None of two trainings that are equal in all bits, which need no baseline.
    """
    ends = {"first": off[0], "last": off[-1], "on": on[-1]}
    if marks is None:
        return {**ends, "distance": None, "baseline": None, "share": 0.0}
    distances = [abs(a - b) / a for a, b in zip(off, on, strict=True)]
    # In the first steps both are the noise of one rounding.
    share = max(each / max(*marks[: index + 1], 2.0**-12) for index, each in enumerate(distances))
    return {**ends, "distance": max(distances), "baseline": max(marks), "share": share}


def _losses(result: Any) -> list[float]:
    return [float.fromhex(loss) for loss, _ in result.history()]


def _text(folder: Path) -> str:
    """English prose that every machine has: the help texts of Python's standard library."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    assert spec is not None and spec.origin is not None
    path = folder / "text"
    path.write_bytes(Path(spec.origin).read_bytes())
    return str(path)


def _line(row: Mapping[str, Any]) -> str:
    found = "bitwise" if row["distance"] is None else f"distance {row['distance']:.1e}, {row['share']:.2f} of baseline"
    ends = f"{row['first']:.4f} -> {row['last']:.4f}"
    return f"{row['release']}  {row['layout']:22}  {row['features']:34}  {ends}  {found}"


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each feature and length of training: the worst of its layouts and releases."""
    order = [*EVERY_LAYOUT]
    groups: dict[tuple[bool, str, int], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: order.index(row["layout"])):
        is_exchange = row["layout"] in EXCHANGE_LAYOUTS
        groups.setdefault((is_exchange, row["features"], row["steps"]), []).append(row)
    held = sum(row["share"] <= ALLOWED for row in rows)
    lines = [
        "# Losses on against off",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
        "",
        f"`python -m benchmarks.agreement`, with `--steps`, `--releases`, `--layouts` and `--features`: {held} of "
        f"{len(rows)} trainings hold. Of each feature the worst one is shown: its largest distance, the baseline's, "
        "and the largest share up to a step.",
        "",
        "| Feature | Steps | Layouts | Megatron | Distance | Baseline | Share |",
        "| --- | ---: | --- | --- | ---: | ---: | --- |",
    ]
    for (_, feature, steps), found in groups.items():
        worst = max(found, key=lambda row: row["share"])
        # Rounded up: what is beyond the baseline must not read as if it were within.
        share = f"{math.ceil(100 * worst['share']) / 100:.2f} ({worst['layout']}, {worst['release']})"
        cells = [
            feature,
            str(steps),
            ", ".join(dict.fromkeys(row["layout"].removeprefix("exchange ") for row in found)),
            ", ".join(sorted({row["release"] for row in found})),
            *(
                ("bitwise", "", "")
                if worst["distance"] is None
                else (f"{worst['distance']:.1e}", f"{worst['baseline']:.1e}", share)
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    raise SystemExit(main())
