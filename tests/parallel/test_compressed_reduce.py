"""Compressed reductions over real processes: sums, error feedback, bytes, NaN, and planted faults."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lab.network import sent_to_each
from mindspeed_lite.parallel import compressed_reduce
from mindspeed_lite.parallel.block_codes import BLOCK, FORMATS, BlockCodes
from mindspeed_lite.parallel.compressed_reduce import CompressedReduce
from mindspeed_lite.parallel.node_groups import NodeGroups
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

# Largest rounding error of a block, relative to its largest value.
BOUND = {"int8": 0.5 / 127, "fp8": 2.0**-4, "bf16": 2.0**-8}
STEPS = 6


def _code(code: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded, residual)"""
    codes, residual = BlockCodes(code, len(x)), torch.zeros(len(x), dtype=torch.bfloat16)
    row, out = torch.empty(codes.row_bytes, dtype=torch.uint8), torch.empty(len(x))
    codes.encode(row, x, residual)
    codes.decode(row, out)
    return out, residual


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 5, (1 << 17) + 130])
def test_an_error_is_at_most_half_a_step_of_its_block_and_stays_in_the_residual(code, size):
    torch.manual_seed(size)
    x = torch.randn(size) * torch.logspace(-30, 6, size)
    out, residual = _code(code, x)
    padded = torch.nn.functional.pad(x.abs(), (0, -size % BLOCK)).view(-1, BLOCK)
    largest = padded.amax(1).repeat_interleave(BLOCK)[:size]
    assert ((x - out).abs() <= 1.001 * BOUND[code] * largest).all()
    torch.testing.assert_close(residual.float(), x - out, rtol=2.0**-8, atol=1e-38)


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_and_does_not_stay(code, bad):
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 7] = bad
    out, residual = _code(code, x)
    assert not out[BLOCK + 7].isfinite() and (out[:BLOCK] == 1).all() and (out[2 * BLOCK :] == 1).all()
    assert residual.isfinite().all()


def test_zeros_and_values_too_small_for_a_scale():
    out, residual = _code("int8", torch.tensor([0.0, 1e-40, -3e-39]))
    assert (out == 0).all() and residual[2] != 0


def _gradient(rank: int, step: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(size, generator=generator) * torch.logspace(-3, 0, size)).to(dtype)


def _shards(reduce: CompressedReduce, gradient: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return gradient.view(ranks, -1)[rank] if reduce.scatters else gradient


def _lost_in_sums(reduce: CompressedReduce, nodes: NodeGroups | None, ranks: int, rank: int, size: int) -> torch.Tensor:
    """What all residuals still owe to the sum, [size] on every rank."""
    local, peers = (1, ranks) if nodes is None else (nodes.ranks, nodes.nodes)
    node, place = divmod(rank, local)
    owed = torch.zeros(peers, local, -(-size // ranks), dtype=torch.float64)
    owed[[each for each in range(peers) if each != node], place] += reduce.residuals[0].double()
    if not reduce.scatters:
        owed[node, place] += reduce.residuals[1][0].double() * DIVISOR
    dist.all_reduce(owed)
    return owed.view(-1)[:size]


DIVISOR = 4


def _error(rank, ranks, folder, code, scatters, node_size, dtype, size, fault=None):
    """Largest deviation, over steps, of reduced + owed from the sum of all gradients in float64, and its scale."""
    world = joined(rank, ranks, folder)
    nodes = NodeGroups(world, node_size) if node_size else None
    reduce = CompressedReduce(size, torch.device("cpu"), world, code, scatters=scatters, nodes=nodes)
    reduced, exact = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for step in range(STEPS):
        gradient = _gradient(rank, step, size, dtype)
        with fault(step, rank) if fault else mock.patch.object(reduce, "none", create=True):
            reduce.start(gradient, DIVISOR).wait()
        exact += sum(_gradient(each, step, size, dtype).double() for each in range(ranks))
        if scatters:
            parts = [torch.empty(size // ranks, dtype=dtype) for _ in range(ranks)]
            dist.all_gather(parts, _shards(reduce, gradient, ranks, rank).contiguous())
            gradient = torch.cat(parts)
        else:
            same = gradient.clone()
            dist.broadcast(same, 0)
            assert torch.equal(same, gradient), "replicas hold the same bits"
        reduced += gradient.double() * DIVISOR
    error = (reduced + _lost_in_sums(reduce, nodes, ranks, rank, size) - exact).abs()
    return float((error / exact.abs().clamp(min=1e-3)).mean())


CASES = [
    (2, "int8", True, 0, torch.float32, 4096),
    (2, "int8", False, 0, torch.float32, 4097),
    (4, "int8", False, 0, torch.bfloat16, 1030),
    (4, "fp8", True, 0, torch.float32, 1200),
    (4, "fp8", False, 2, torch.float32, 1201),
    (4, "int8", True, 2, torch.float32, 2048),
    (4, "bf16", False, 2, torch.float32, 999),
    (2, "fp8", True, 0, torch.bfloat16, 640),
]


@forked("features")
@pytest.mark.parametrize("case", CASES)
def test_all_that_was_sent_arrives_or_is_owed(tmp_path, case):
    ranks, code, scatters, node_size, dtype, size = case

    def body(rank):
        error = _error(rank, ranks, tmp_path, code, scatters, node_size, dtype, size)
        # Residuals lose 2^-9 of what a message loses; bf16 gradients round once more.
        assert error < (2e-2 if dtype == torch.bfloat16 else 2e-3), error

    on_ranks(ranks, body)


def _wrong_scale(step, rank):
    original = BlockCodes.encode

    def encode(self, row, x, residual):
        original(self, row, x, residual)
        if step == 2 and rank == 1:
            row[-4:].view(torch.float32).mul_(2)

    return mock.patch.object(BlockCodes, "encode", encode)


def _lost_residual(step, rank):
    original = CompressedReduce.start

    def start(self, *args):
        if step == 3 and rank == 1:
            self.residuals[0].zero_()
        return original(self, *args)

    return mock.patch.object(CompressedReduce, "start", start)


def _chunk_twice(step, rank):
    original = BlockCodes.add

    def add(self, rows, out, divisor=1):
        original(self, torch.cat([rows, rows[:1]]) if step == 2 and rank == 0 else rows, out, divisor)

    return mock.patch.object(BlockCodes, "add", add)


@forked("features")
@pytest.mark.parametrize("fault", ["", "_wrong_scale", "_lost_residual", "_chunk_twice"])
def test_planted_faults_are_found(tmp_path, fault):
    def body(rank):
        error = _error(rank, 2, tmp_path, "int8", True, 0, torch.float32, 256, fault=globals().get(fault))
        assert error > 2e-3 if fault else error < 2e-4, error

    on_ranks(2, body)


@forked("features")
def test_without_error_feedback_small_gradients_are_never_seen(tmp_path):
    """One value of a block is 1,000 times the others: below half a step, they round to 0 in each step."""

    def body(rank):
        world = joined(rank, 2, tmp_path)
        moved = {}
        for feedback in (True, False):
            reduce = CompressedReduce(2 * BLOCK, torch.device("cpu"), world, "int8", scatters=True)
            moved[feedback] = torch.zeros(BLOCK)
            for _ in range(100):
                gradient = torch.full((2 * BLOCK,), 1e-3)
                gradient[::BLOCK] = 1.0
                if rank == 0:  # the other rank's messages are what reaches rank 0
                    gradient[:BLOCK] = 0
                reduce.start(gradient).wait()
                moved[feedback] += gradient.view(2, BLOCK)[rank]
                if not feedback:
                    for each in reduce.residuals:
                        each.zero_()
        if rank == 0:
            assert (moved[False][1:] == 0).all()
            # 100 steps of 1e-3, but for less than one step of the block.
            assert ((moved[True][1:] - 0.1).abs() <= 1 / 127).all() and (moved[True][1:] > 0.09).all()

    on_ranks(2, body)


@forked("features")
@pytest.mark.parametrize("scatters", [True, False])
def test_bytes_are_a_quarter_of_fp32s(tmp_path, scatters):
    size = 1 << 14

    def body(rank):
        world = joined(rank, 4, tmp_path)
        reduce = CompressedReduce(size, torch.device("cpu"), world, "int8", scatters=scatters)
        sent = 0

        def counted(name):
            original = getattr(dist, name)

            def collective(*args, **kwargs):
                nonlocal sent
                names = ("output", "input", "output_split_sizes", "input_split_sizes")
                given = dict(zip(names, args, strict=False))
                if name == "all_gather_into_tensor":
                    given["input_tensor"] = args[1]
                each = sent_to_each(name, given, 4)
                sent += sum(size for peer, size in enumerate(each) if peer != rank)
                return original(*args, **kwargs)

            return mock.patch.object(compressed_reduce.dist, name, collective)

        with counted("all_to_all_single"), counted("all_gather_into_tensor"):
            reduce.start(torch.ones(size)).wait()
        fp32 = size // 4 * 3 * 4 * (1 if scatters else 2)
        assert 0.25 < sent / fp32 <= 0.27, sent / fp32

    on_ranks(4, body)
