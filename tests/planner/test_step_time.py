"""The cost model: parts add up to the whole, more work takes more time, and every term of it counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.planner import ArgumentError, calibrated, devices, layouts, orders, parameters, read, step_time
from mindspeed_lite.planner.pipeline_costs import flops, model_stages
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.step_time import Pricer
from mindspeed_lite.planner.work import CollectiveCall, DeviceCosts, Group, Product

BASE = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
    "--global-batch-size 32 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 --hidden-dropout 0 "
    "--attention-dropout 0 --use-flash-attn --use-distributed-optimizer"
)
EXPERTS = (
    f"{BASE} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 4 --moe-grouped-gemm"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP4 = "--pipeline-model-parallel-size 4"
CP2 = "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
SHARED = "--moe-shared-expert-intermediate-size 1024"
LATENT = "--multi-latent-attention --kv-lora-rank 512"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def device(**changed: object) -> PublishedDevice:
    """An H100 that never waits for its host, which hides what the tests are about."""
    name, figures = devices.named("h100")
    return PublishedDevice(name, dataclasses.replace(figures, **({"launch": 0.0} | changed)))  # type: ignore[arg-type]


def seconds(words: str, ranks: int = 8, of: DeviceCosts | None = None) -> float:
    return step_time.step(read(words.split(), ranks), Pricer(of or device())).seconds


@pytest.mark.parametrize("more", ["", TP2, PP4, CP2, FULL, f"{TP2} {PP4}", f"{PP4} --pipeline-schedule zb-h1"])
def test_parts_add_up_and_the_bound_is_below(more: str) -> None:
    pricer = Pricer(device())
    training = read(f"{BASE} {more}".split(), 8)
    step = step_time.step(training, pricer)
    assert step.seconds == pytest.approx(sum(step.parts.values())) and min(step.parts.values()) > 0
    held = [parameters.of_stage(training, row) for row in orders.chunks_of_ranks(training)]
    assert 0 < step_time.lower_bound(training, pricer, held) <= step.seconds
    # No step is faster than its flops at the peak.
    work = sum(sum(flops(training, chunk)) for chunk in model_stages(training, training.vpp)) * training.microbatches
    assert step.seconds * training.pp * device().figures.flops > work


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (BASE, BASE.replace("--num-layers 8", "--num-layers 16")),
        (BASE, BASE.replace("--seq-length 2048", "--seq-length 4096")),
        (BASE, BASE.replace("--global-batch-size 32", "--global-batch-size 64")),
        (BASE, BASE.replace("32000", "128000")),
        (BASE, f"{BASE} {FULL}"),
        (f"{BASE} --overlap-grad-reduce", BASE),
        (f"{BASE} --overlap-param-gather", BASE),
        (f"{BASE} --use-fused-rmsnorm", BASE),
        (f"{BASE} --no-bias-swiglu-fusion --use-fused-swiglu", f"{BASE} --no-bias-swiglu-fusion"),
        (BASE, f"{BASE} --no-gradient-accumulation-fusion"),
        (f"{BASE} --transformer-impl transformer_engine", BASE),
        (f"{BASE} --window-size 511,0", BASE),
        (f"{BASE} --interleave-sliding-window 511", BASE),
        (f"{BASE} --window-size 511,0", f"{BASE} --interleave-sliding-window 511"),
        (f"{BASE} --use-fused-adamw", BASE),
        (BASE, BASE.replace("--use-flash-attn", "")),
        (f"{BASE} {TP2} --use-ascend-coc", f"{BASE} {TP2}"),
        (f"{BASE} {TP2} --tp-comm-overlap", f"{BASE} {TP2}"),
        (EXPERTS, f"{EXPERTS} {SELECTIVE} moe_act"),
        (f"{EXPERTS} {SELECTIVE} moe_act", f"{EXPERTS} {SELECTIVE} moe"),
        (f"{EXPERTS} {SHARED}", f"{EXPERTS} {SHARED} {SELECTIVE} shared_experts"),
        (f"{BASE} {LATENT}", f"{BASE} {LATENT} {SELECTIVE} mla_up_proj"),
        (f"{BASE} {PP4} --num-virtual-stages-per-pipeline-rank 2", f"{BASE} {PP4}"),
        (f"{EXPERTS} --moe-fb-overlap", EXPERTS),
        (f"{EXPERTS} --moe-permute-fusion", EXPERTS),
        (EXPERTS.replace("alltoall", "flex"), EXPERTS),
        (f"{EXPERTS} --moe-enable-deepep", EXPERTS),
        (EXPERTS, f"{EXPERTS} --moe-zero-memory level0"),
        (f"{EXPERTS} --moe-zero-memory level0", f"{EXPERTS} --moe-zero-memory level1"),
        (f"{EXPERTS} --moe-zero-memory level0 --moe-zero-memory-num-layers 1", f"{EXPERTS} --moe-zero-memory level0"),
        (f"{EXPERTS} --moe-alltoall-mc2", EXPERTS),
    ],
)
def test_more_work_takes_longer_and_a_feature_less(one: str, two: str) -> None:
    assert seconds(one) < seconds(two)


SLOW = {"network": 125e6}
INT8 = "--grad-reduce-compression int8"


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_compression_pays_between_nodes_of_slow_links(optimizer: str) -> None:
    def reduced(more: str, ranks: int = 128, **figures: float) -> float:
        words = f"{BASE.replace('--use-distributed-optimizer', optimizer)} --global-batch-size 128 {more}".split()
        return step_time.step(read(words, ranks), Pricer(device(**figures))).parts["gradients"]

    # A quarter of the bytes cross, and an all-to-all reaches less of the links than a ring.
    assert 2.5 < reduced("", **SLOW) / reduced(INT8, **SLOW) < 4
    assert 1.3 < reduced("--grad-reduce-in-bf16", **SLOW) / reduced(INT8, **SLOW) < 2.2
    assert reduced(INT8, network=1e15) > reduced("", network=1e15)
    # Eight ranks of a node that each send all of their gradients.
    assert reduced(f"{INT8} --grad-reduce-compression-scope all", **SLOW) > 3 * reduced(INT8, **SLOW)
    assert reduced(f"{INT8} --grad-reduce-compression-scope between-nodes", 8) == reduced("", 8)


def test_tokens_that_are_not_even_take_longer() -> None:
    training = read(EXPERTS.split(), 8)
    even, uneven = (step_time.step(training.replace(expert_load=load), Pricer(device())) for load in (1.0, 1.5))
    assert uneven.parts["experts"] > 1.2 * even.parts["experts"]
    assert uneven.parts["expert parallel"] > 1.2 * even.parts["expert parallel"]


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ("flops", BASE),
        ("memory_bandwidth", BASE),
        ("link", f"{BASE} {TP2}"),
        ("link", f"{BASE} {CP2} --global-batch-size 32"),
        ("link", EXPERTS),
        ("network", f"{BASE} --global-batch-size 128"),
        ("host_link", f"{BASE} --swap-optimizer"),
    ],
)
def test_every_figure_of_a_device_counts(figure: str, words: str) -> None:
    """A device with half of it is slower."""
    ranks = 32 if figure == "network" else 8
    half = device(**{figure: getattr(device().figures, figure) / 2})
    # What is sent beside a ring's attention shows where it takes longer than that.
    if "context" in words:
        half = device(link=1e9)
    assert seconds(words, ranks, half) > seconds(words, ranks) * 1.0001


def test_a_host_that_is_slow_is_waited_for() -> None:
    slow = device(launch=5e-5)
    waits = step_time.step(read(BASE.split(), 8), Pricer(slow)).parts["host"]
    assert (
        waits > 0.5 * seconds(BASE)
        and seconds(f"{BASE} --enable-cuda-graph", of=slow) < seconds(BASE, of=slow) - waits / 2
    )
    large = step_time.step(read(BASE.replace("--hidden-size 2048", "--hidden-size 8192").split(), 8), Pricer(slow))
    assert large.parts["host"] == pytest.approx(slow.step_overhead())


def test_full_meshes_have_a_link_for_each_peer() -> None:
    mesh = device(peer=device().figures.link / 7)
    for size, slower in ((2, 7), (4, 7 / 3), (8, 1)):
        call = CollectiveCall("all_gather", 1e10, Group(size))
        assert mesh.message(call) == pytest.approx(slower * device().message(call), rel=1e-3)


def test_exchanges_over_more_nodes_are_slower() -> None:
    taken = [device().message(CollectiveCall("all_to_all", 1e9, Group(size))) for size in (8, 16, 32, 64)]
    assert taken == sorted(taken) and taken[3] > 2 * taken[1]


def test_many_micro_batches_are_extrapolated_as_they_would_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for more in (PP4, f"{PP4} --num-virtual-stages-per-pipeline-rank 2"):
        training = read(f"{BASE} {more} --global-batch-size 128".split(), 4)
        short = step_time.step(training, Pricer(device(step=0.0))).seconds
        pricer = Pricer(device(step=0.0))
        rows = orders.chunks_of_ranks(training)
        priced = [[pricer.chunk(training, chunk, number) for number, chunk in enumerate(row)] for row in rows]
        whole = simulate(orders.schedule(training), step_time._costs(training, priced, pricer)).makespan
        assert short == pytest.approx(whole, rel=0.03)


def test_collectives_by_size_and_group() -> None:
    one = device()
    small, large = (one.message(CollectiveCall("all_reduce", size, Group(8))) for size in (1e6, 1e8))
    assert small < large
    assert one.message(CollectiveCall("all_reduce", 1e8, Group(1))) == 0
    inside, across = (one.message(CollectiveCall("all_gather", 1e8, Group(8, stride))) for stride in (1, 8))
    assert inside < across
    assert one.message(CollectiveCall("all_reduce", 1e8, Group(8))) == pytest.approx(
        2 * one.message(CollectiveCall("all_gather", 1e8, Group(8)))
    )


def test_what_was_measured_is_what_is_predicted_at_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    samples = [
        {"key": ["product", "forward", "2"], "shape": list(shape), "work": 2.0 * shape[0] * shape[1] * shape[2],
         "seconds": taken}
        for shape, taken in (((64, 64, 64), 1e-4), ((512, 512, 512), 1e-2))
    ]  # fmt: skip
    data = {
        "format": calibrated.FORMAT, "device": "d", "kind": "cpu", "cores": 2, "ranks_per_node": 2, "overlap": 0.0,
        "operators": {"1": samples},
        "collectives": [
            {"kind": "all_reduce", "ranks": 2, "bytes": size, "seconds": taken, "width": 4}
            for size, taken in ((1e3, 1e-4), (1e6, 1e-3))
        ],
        "overheads": {"layer": 3e-3, "microbatch": 6e-3, "step": 1e-3},
    }  # fmt: skip
    file.write_text(json.dumps(data))
    found = calibrated.read(file)
    assert [found.layer_overhead(each) for each in (False, True)] == pytest.approx([1e-3, 2e-3])
    assert found.pass_overhead(True) == pytest.approx(4e-3) and found.step_overhead() == 1e-3
    assert found.product(Product(512, 512, 512), "forward", 2) == pytest.approx(1e-2, rel=1e-2)
    between = found.product(Product(256, 256, 256), "forward", 2)
    assert 1e-4 < between < 1e-2
    assert found.message(CollectiveCall("all_reduce", 1e6, Group(2))) == pytest.approx(1e-3)
    assert found.message(CollectiveCall("all_reduce", 2e6, Group(2))) == pytest.approx(2e-3, rel=0.15)
    # Reductions depend on the width of a number, where both were measured.
    data["collectives"].append({"kind": "all_reduce", "ranks": 2, "bytes": 1e6, "seconds": 3e-3, "width": 2})
    file.write_text(json.dumps(data))
    both = calibrated.read(file)
    seen = [both.message(CollectiveCall("all_reduce", 1e6, Group(2), width)) for width in (2, 4)]
    assert seen == pytest.approx([3e-3, 1e-3])
    assert found.shared(10.0, 3.0, 4) == 5.0 and found.shared(10.0, 3.0, 2) == 3.0
    with pytest.raises(ArgumentError, match="holds no optimizer plain"):
        found.optimizer(1e6, False)
    file.write_text("{}")
    with pytest.raises(ArgumentError, match="calibrate` again"):
        calibrated.read(file)


def test_layouts_are_as_even_as_whole_layers_allow() -> None:
    assert layouts.balanced([1.0] * 8, 0.0, 0, 1e-9, 4) in ("Ett|tt|tt|ttL", "Ett|tt|ttt|tL", "Ett|tt|tt|ttL")
    text = layouts.balanced([1.0] * 61, 1.3, 1, 0.7, 32)
    assert text is not None and text.count("t") == 61 and text.count("|") == 31 and text.endswith("L")
    assert max(part.count("t") for part in text.split("|")) == 2
    assert layouts.balanced([1.0] * 2, 0.0, 0, 1.0, 5) is None
