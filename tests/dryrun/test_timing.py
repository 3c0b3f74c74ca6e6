"""Time of a step from what its ranks ran, at the planner's prices; memory that a device needs besides tensors."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.dryrun import prices, reserve, timing
from mindspeed_lite.dryrun.calls import PIPELINE, GroupCall
from mindspeed_lite.dryrun.clock import Clock
from mindspeed_lite.dryrun.fake_tensors import StoragelessMode
from mindspeed_lite.dryrun.rank import RankResult
from mindspeed_lite.dryrun.work import WorkRecorder
from mindspeed_lite.ops import traced
from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.grouped_matmul import grouped_matmul
from mindspeed_lite.planner import devices
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.work import CollectiveCall, Group, Product, Scores

H100 = PublishedDevice(*devices.named("h100"))
LAUNCH, OVERLAP = H100.figures.launch, H100.figures.overlap
PAIR = (0, 1)


def spent(clock, during="forward"):
    return {name: seconds for (at, name), seconds in clock.seconds.items() if at == during}


def test_the_device_waits_for_the_host_and_the_host_for_values():
    clock = Clock(H100)
    for _ in range(3):
        clock.operator("forward", "products", 1e-6)
    # Each operator is shorter than its launch.
    assert spent(clock) == pytest.approx({"host": 3 * LAUNCH - 2e-6, "products": 3e-6})
    clock = Clock(H100)
    clock.operator("forward", "products", 1.0)
    clock.view()
    clock.operator("forward", "vector", 1e-6)
    assert spent(clock)["host"] == pytest.approx(LAUNCH)
    clock.read_by_host()
    clock.view()
    clock.operator("forward", "vector", 1e-6)
    assert spent(clock)["host"] == pytest.approx(2.5 * LAUNCH)


def test_a_message_waits_or_overlaps():
    clock = Clock(H100)
    clock.operator("forward", "products", 1.0)
    end = clock.message("forward", "data parallel", PAIR, 2.0, True)
    clock.operator("forward", "products", 1.5)
    clock.wait("gradients", "data parallel", end)
    slowed = 2.0 * (1 - OVERLAP)
    assert spent(clock)["data parallel"] == pytest.approx(slowed)
    assert spent(clock, "gradients") == pytest.approx({"data parallel": 2.0 - slowed - 1.5})
    clock.message("forward", "tensor parallel", PAIR, 1.0, False)
    assert spent(clock)["tensor parallel"] == pytest.approx(1.0)


def test_prices_are_the_planners():
    x, y = torch.ones(64, 32, 16), torch.ones(64, 16, 8)
    assert prices.products("bmm", (x, y)) == [Product(64 * 32, 16, 8)]
    assert prices.products("addmm", (None, x[0], y[0])) == [Product(32, 16, 8)]
    assert not prices.products("add", (x, x))
    group, size = (0, 8, 16, 24), 1 << 20
    for kind, priced, whole in (
        ("all_reduce", "all_reduce", size), ("all_gather_into_tensor", "all_gather", 4 * size),
        ("reduce_scatter_tensor", "reduce_scatter", 4 * size), ("all_to_all_single", "all_to_all", size),
        ("broadcast", "all_gather", size),
    ):  # fmt: skip
        expected = H100.message(CollectiveCall(priced, whole, Group(4, 8)))
        assert prices.message(H100, kind, group, size, 2) == expected, kind


def test_kernels_are_priced_by_what_they_do(monkeypatch):
    monkeypatch.setattr(traced, "dry", True)
    with StoragelessMode() as mode:
        recorder = WorkRecorder(Clock(H100))
        q = torch.ones(4096, 1, 4, 128, dtype=torch.bfloat16)
        x = torch.ones(1024, 512, dtype=torch.bfloat16)
        weights = [torch.ones(2048, 512, dtype=torch.bfloat16) for _ in range(2)]
        with recorder.recording(mode, []), torch.no_grad():
            attention(q, q, q, causal=True)
            grouped_matmul(x, weights, [256, 768])
            x @ x.t()
    found = spent(recorder.clock)
    share = 4097 / 2 / 4096
    assert found["attention"] == pytest.approx(
        H100.scores(Scores(1, 4096, 4096, 4, 128, 128, share, True), False, 2), rel=1e-6
    )
    assert found["products"] == pytest.approx(H100.product(Product(1024, 512, 1024), "forward", 2))
    rows = [H100.product(Product(each, 512, 2048, 1), "forward", 2) for each in (256, 768)]
    assert found["experts"] == pytest.approx(sum(rows))


def stage(number, seconds, **facts):
    given = {
        "seconds": seconds, "chunks": 1, "group": 0, "order": "", "overlaps_experts": False,
        "overlaps_parameters": False, "splits_products": False, "gathers": 0, "message": 0.0, "tokens": 30,
        "operations": 300.0,
    }  # fmt: skip
    return RankResult(number, groups={PIPELINE: (0, 4)}, micro_batches=(3, 8), time={**given, **facts})


def passes(forward, backward, **more):
    named = {"forward": forward, "backward": backward, **more}
    return [[during, "products", seconds] for during, seconds in named.items()]


def test_stages_fill_and_drain_and_the_rest_follows():
    ranks = [stage(each, passes(3.0, 6.0, gradients=0.5, optimizer=0.25, preparation=0.5)) for each in (0, 4)]
    step = timing.predict(timing.stages_of(ranks), H100)
    # Eight micro-batches of 1 + 2 seconds, and another stage's first forward and last backward.
    assert step.seconds == pytest.approx(8 * 3 + 3 + 0.5 + 0.75 + H100.figures.step)
    assert step.parts["pipeline"] == pytest.approx(3) and step.exposed == pytest.approx(0.5)
    assert (step.tokens, step.operations) == (80, 800)
    # Many micro-batches are extrapolated.
    long = [RankResult(**{**vars(each), "micro_batches": (3, 400)}) for each in ranks]
    assert timing.predict(long, H100).parts["pipeline"] == pytest.approx(3)


def test_what_features_overlap_is_hidden_up_to_the_computation():
    seconds = [["forward", "products", 1.0], ["forward", "expert parallel", 4.0], ["backward", "products", 9.0],
               ["backward", "expert parallel", 4.0]]  # fmt: skip
    one = RankResult(0, micro_batches=(1, 1), time=stage(0, seconds, overlaps_experts=True).time)
    assert timing.predict([one], H100).parts["expert parallel"] == pytest.approx(3 + 4 * (1 - 0.9 * OVERLAP))


def test_gathered_parameters_overlap_but_for_the_first():
    time = stage(0, passes(1.0, 2.0, parameters=1.0), overlaps_parameters=True, gathers=4).time
    one = RankResult(0, micro_batches=(1, 1), time=time)
    assert timing.predict([one], H100).parts["parameters"] == pytest.approx(1 - OVERLAP * 3 / 4)


def test_communicators_are_those_of_groups_with_messages():
    calls = [GroupCall(PAIR, "all_reduce", "float32", 8), GroupCall(PAIR, "broadcast", "float32", 8),
             GroupCall((0, 2, 4, 6), "all_to_all_single", "float32", 8), GroupCall((0,), "all_reduce")]  # fmt: skip
    one = RankResult(0, messages=calls)
    found = reserve.needed(one, "cuda", {}, 1_000)
    assert found["buffers of 2 communicators"] == reserve.NCCL_PAIR + reserve.NCCL_ALL_TO_ALL
    assert found["fragments and temporary tensors"] == 50
    for environment, megabytes in (({}, 800), ({"HCCL_BUFFSIZE": "50"}, 200)):
        assert reserve.needed(one, "npu", environment, 0)["buffers of 2 communicators"] == megabytes * 1e6
