"""Every rule by which time goes to a category, on made-up events, and the profiler's own events for small models."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.bench import breakdown
from mindspeed_lite.bench.breakdown import CATEGORIES, PREFIX, STEP, Event, attribute
from mindspeed_lite.bench.probes import profiler_ranges
from tests.harness import matrix
from tests.harness.patience import once_of
from tests.harness.processes import forked, on_ranks

NODE = "autograd::engine::evaluate_function: "
SECOND = 10**9


def of(*events, wall=100):
    """The categories of a step of `wall` seconds that are not zero, and its communication; times in seconds."""
    scaled = [Event(STEP, 0, wall * SECOND)]
    for name, start, end, fields in events:
        scaled.append(Event(name, start * SECOND, end * SECOND, **fields))
    found = attribute(scaled)
    assert list(found["categories"]) == list(CATEGORIES)
    assert sum(found["categories"].values()) == pytest.approx(found["wall_seconds"], abs=1e-9) == wall
    communication = found["communication"]
    assert communication["hidden_seconds"] >= 0
    assert communication["total_seconds"] == pytest.approx(
        communication["exposed_seconds"] + communication["hidden_seconds"]
    )
    return {name: seconds for name, seconds in found["categories"].items() if seconds}, communication


def op(name, start, end, **fields):
    return name, start, end, fields


def scope(category, start, end, **fields):
    return PREFIX + category, start, end, fields


def test_outside_of_scopes_names_decide_and_the_outermost_one_that_says_something():
    found, _ = of(
        op("aten::linear", 0, 10),
        op("aten::t", 1, 2),
        op("aten::addmm", 2, 9),
        op("aten::copy_", 3, 4),
        op("aten::to", 20, 30),
        op("aten::_to_copy", 21, 29),
        op("aten::copy_", 22, 28),
        op("aten::scaled_dot_product_attention", 40, 50),
        op("aten::_scaled_dot_product_flash_attention_for_cpu", 41, 49),
        op("aten::bmm", 42, 44),
        op("aten::gelu", 60, 70),
        op("aten::contiguous", 61, 63),
        op("aten::cat", 70, 71),
        op("aten::index_select", 71, 72),
        op("Optimizer.step#AdamW.step", 80, 85),
        op("aten::mm", 81, 82),
    )
    assert found == {"linear": 10, "copies": 14, "attention": 10, "optimizer": 5, "other": 61}


def test_the_innermost_scope_decides_and_beats_names():
    found, _ = of(
        scope("moe", 0, 50),
        scope("activation", 10, 40),
        op("aten::silu", 12, 14),
        scope("linear", 15, 25),
        op("aten::mm", 16, 24),
        op("aten::copy_", 24, 25),
        scope("norm", 60, 70),
        op("aten::to", 60, 65),
        op("aten::copy_", 61, 64),
        op("aten::mm", 65, 70),
    )
    assert found == {"moe": 20, "activation": 20, "linear": 10, "norm": 10, "other": 40}
    assert of(scope("nonsense", 0, 10), op("aten::mm", 2, 5))[0] == {"linear": 3, "other": 97}
    # Megatron calls products of all experts in a module whose name says MLP.
    assert of(scope("activation", 0, 10), op("_GroupedMatmul", 2, 5))[0] == {"activation": 7, "linear": 3, "other": 90}


def test_a_backward_operator_belongs_to_the_scope_of_the_forward_operator_of_its_number():
    backward = {"forward_thread": 1}
    found, _ = of(
        scope("norm", 0, 10),
        # The number is the next node's: the last operator that saw it is the one that made the node.
        op("aten::view", 0, 1, sequence=7),
        op("aten::rsqrt", 1, 2, sequence=8),
        scope("activation", 10, 20),
        op("aten::detach", 10, 11, sequence=9),
        scope("linear", 20, 30),
        op("aten::mm", 20, 30, sequence=9),
        op("aten::exp", 30, 31, sequence=10),
        op(NODE + "ExpBackward0", 40, 44, sequence=10, **backward),
        op("aten::copy_", 41, 43),
        op(NODE + "MmBackward0", 50, 60, sequence=9, **backward),
        op("MmBackward0", 50, 60, sequence=9, **backward),
        op("aten::clone", 51, 59),
        op(NODE + "RsqrtBackward0", 60, 65, sequence=8, **backward),
        op("aten::mm", 61, 64),
        op(NODE + "SomethingBackward0", 70, 75, sequence=8, forward_thread=3),
        op("aten::mm", 71, 74),
    )
    assert found == {"norm": 15, "activation": 10, "linear": 23, "copies": 2, "other": 50}


def test_a_collective_that_blocks_is_exposed_whatever_scope_it_is_in():
    found, communication = of(
        scope("linear", 0, 50),
        op("c10d::_reduce_scatter_base_", 10, 20),
        op("aten::clone", 11, 19),
        scope("communication exposed", 20, 30),
        op("aten::copy_", 25, 26),
        op("record_param_comms", 60, 61),
    )
    assert found == {"linear": 30, "communication exposed": 21, "other": 49}
    assert communication == {"total_seconds": 21, "exposed_seconds": 21, "hidden_seconds": 0}


def kernel(name, start, end, **fields):
    return name, start, end, {"is_device": True, "thread": 99, **fields}


def test_on_an_accelerator_kernels_count_where_they_were_launched():
    found, communication = of(
        scope("norm", 0, 5, id=1),
        op("aten::mul", 1, 2, id=2, sequence=0),
        op("cudaLaunchKernel", 1, 2, thread=77, id=1, linked=2),
        op("cudaLaunchKernel", 3, 4, thread=77, id=5001),
        op("aten::copy_", 6, 7, id=3),
        op(NODE + "MulBackward0", 8, 9, id=4, sequence=0, forward_thread=1, thread=2),
        op("aten::mm", 8, 9, id=5, thread=2),
        kernel("elementwise", 10, 20, id=1, linked=2),
        kernel("a kernel of no operator", 20, 30, id=5001),
        kernel("Memcpy DtoD", 30, 35, id=2, linked=3),
        kernel("gemm", 40, 50, id=3, linked=5),
        kernel("unknown", 50, 55, id=4),
        # The device's picture of a host range is no kernel.
        kernel(PREFIX + "norm", 10, 30),
    )
    assert found == {"norm": 30, "copies": 5, "other": 65}
    assert communication["total_seconds"] == 0


def test_on_an_accelerator_communication_is_exposed_where_nothing_computes():
    found, communication = of(
        op("aten::mm", 0, 1, id=1),
        op("aten::mm", 1, 2, id=2),
        scope("communication exposed", 2, 90),
        kernel("gemm", 10, 30, linked=1),
        kernel("gemm", 20, 40, linked=2),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 25, 60),
        kernel("nccl:all_reduce", 25, 95),
        kernel("ncclDevKernel_AllGather", 55, 65),
    )
    assert found == {"linear": 30, "communication exposed": 25, "other": 45}
    assert communication == {"total_seconds": 40, "exposed_seconds": 25, "hidden_seconds": 15}


def test_the_mean_over_processes():
    first = attribute([Event(STEP, 0, 4 * SECOND), Event("aten::mm", 0, SECOND)])
    second = attribute([Event(STEP, 0, 2 * SECOND), Event("c10d::barrier", 0, SECOND)])
    both = breakdown.merge([first, second])
    assert both["wall_seconds"] == 3 and both["processes"] == 2
    assert {name: seconds for name, seconds in both["categories"].items() if seconds} == {
        "linear": 0.5, "communication exposed": 0.5, "other": 2,
    }  # fmt: skip
    assert both["communication"] == {"total_seconds": 0.5, "exposed_seconds": 0.5, "hidden_seconds": 0}
    assert list(both["categories"]) == list(CATEGORIES)


# From here on, the profiler's own events. What is planted sleeps or is large, so that other load cannot undo it.

NAP = 0.05


@matrix.whole
@once_of(8)
@forked()
def test_an_asynchronous_collective_is_hidden_and_the_wait_for_the_other_rank_exposed():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
        tensor, matrix = torch.ones(1000), torch.randn(200, 200)

        def join(name, asynchronous):
            """Rank 1 comes in late, counted from the moment at which rank 0 has come in."""
            mark = folder / name
            if rank == 0:
                mark.touch()
            else:
                while not mark.exists():
                    time.sleep(0.001)
                time.sleep(4 * NAP)
            return dist.all_reduce(tensor, async_op=asynchronous)

        def hidden():
            work = join("hidden", True)
            while not work.is_completed():
                matrix @ matrix
            work.wait()

        def exposed():
            join("exposed", False)

        remove = profiler_ranges.install()
        try:
            behind = breakdown.profile(hidden, None)[1]
            waiting = breakdown.profile(exposed, None)[1]
        finally:
            remove()
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            communication = behind["communication"]
            assert communication["hidden_seconds"] > 2 * NAP, behind
            assert communication["exposed_seconds"] < NAP, behind
            assert behind["categories"]["linear"] > NAP, behind
            communication = waiting["communication"]
            assert communication["exposed_seconds"] > 2 * NAP, waiting
            assert communication["hidden_seconds"] < NAP, waiting
            assert waiting["categories"]["communication exposed"] == communication["exposed_seconds"]

    on_ranks(2, body)
