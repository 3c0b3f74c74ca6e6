"""Scripts on the wheel itself, each in a process of its own: the device layer, streams and memory, and a loss."""

from __future__ import annotations

import json

import pytest

from tests.npu_contract.environment import Environment

# Every name of torch.cuda that Megatron asks answers, once the device layer has chosen the NPU.
ASKED = """
import torch
from mindspeed_lite import platform

assert platform.activate("npu").name == "npu"
cuda = torch.cuda
print(cuda.device_memory_used(), cuda.temperature(), cuda.power_draw(), cuda.clock_rate())
cuda.check_error(cuda.cudart().cudaProfilerStart())
with torch.autograd.profiler.emit_nvtx(record_shapes=True), cuda.nvtx.range("a"):
    print(cuda.nvtx.range_push("b"), cuda.nvtx.range_pop())
    cuda.nvtx.range_end(cuda.nvtx.range_start("c"))
    cuda.nvtx.mark("d")
cuda.check_error(cuda.cudart().cudaProfilerStop())
cuda.synchronize()
print("through", cuda.default_generators == torch.npu.default_generators != ())
"""

# Moments in host memory that an NPU addresses: what is copied there comes back.
KEPT = """
import torch
from mindspeed_lite.memory.host_mapped_moments import HostMappedMoments

device = torch.device("npu", 0)
refused = []
for _ in range(3):
    virtual, kept = HostMappedMoments(None, refused.append), {}
    for size in (65536, 65537, 100_003, 1 << 18):
        parameter = torch.empty(size, device=device)
        numbers = [torch.arange(size, dtype=torch.float32) + shift for shift in (0, 1)]
        state = {name: each.to(device) for name, each in zip(("exp_avg", "exp_avg_sq"), numbers)}
        before = list(map(id, state.values()))
        virtual.place(parameter, state)
        assert not set(before) & set(map(id, state.values())), "nothing was moved"
        kept[parameter] = (state, numbers)
    torch.npu.synchronize()
    for state, numbers in kept.values():
        for place, each in zip(state.values(), numbers):
            # A copy on the device is an operator, which the stubs note and do not compute; from the host, as a
            # checkpoint comes, it is the driver's.
            assert place.device == device
            place.copy_(each)
            assert torch.equal(place.cpu(), each)
    assert virtual.nbytes == 8 * sum(parameter.numel() for parameter in kept)
    del virtual, kept, state, place, parameter
print(refused, flush=True)
"""

# Copies between an NPU and its host by streams: names, events, pinned memory, bytes.
COPIED = """
import torch
from mindspeed_lite.memory.copy_engine import PinnedBufferPool, CopyEngine, as_bytes

device = torch.device("npu", 0)
engine = CopyEngine(device)
pool = PinnedBufferPool(engine)
numbers = torch.arange(5000, dtype=torch.int32)
there = numbers.to(device)
buffer = pool.acquire(there.nbytes)
engine.wait(engine.d2h(as_bytes(there.untyped_storage())[: there.nbytes], buffer))
again = torch.empty(there.nbytes, dtype=torch.uint8, device=device)
engine.wait(engine.h2d(buffer, again))
torch.npu.synchronize()
pinned = torch.cat([piece.tensor for piece in buffer.pieces])[: there.nbytes]
print(all(piece.tensor.is_pinned() for piece in buffer.pieces), torch.equal(pinned.view(torch.int32), numbers), end=" ")
print(torch.equal(again.cpu().view(torch.int32), numbers), flush=True)
"""

# Work on a stream that overlaps with compute: names, events, and bytes in their order.
SIDE_STREAM = """
import torch
from mindspeed_lite.platform.side_stream import DeviceStream, SideStream

device = torch.device("npu", 0)
stream = DeviceStream(device)
side = SideStream(stream)
numbers = torch.arange(5000, dtype=torch.int32)
there = torch.empty(5000, dtype=torch.int32, device=device)
streams = []

def job():
    streams.append(torch.npu.current_stream())
    there.copy_(numbers)

for _ in range(3):
    side.submit(job)
side.wait_all()
stream.synchronize()
apart = all(stream != torch.npu.current_stream() for stream in streams)
print(apart, len(set(streams)), len(side), torch.equal(there.cpu(), numbers), flush=True)
"""

# Why cross_entropy has no NPU backend: what npu_cross_entropy_loss returns and keeps. Documented besides: a target lies
# within the vocabulary, and label smoothing has no gradient without a reduction.
LOSS = """
import json
import torch, torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

found = {}
with FakeTensorMode():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.zeros(6, 40, dtype=dtype, device="npu", requires_grad=True)
        target = torch.zeros(6, dtype=torch.int64, device="npu")
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, list(t.shape))) or t, lambda t: t):
            loss, log_prob, *_ = torch_npu.npu_cross_entropy_loss(logits, target, reduction="none")
        whole = any(t is not logits and t.dtype == dtype and shape == [6, 40] for t, shape in kept)
        results = [[str(t.dtype), list(t.shape)] for t in (loss, log_prob)]
        found[str(dtype)] = [*results, whole]
print(json.dumps(found), flush=True)
"""

_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")
# Mode, script and its last lines: three that share a process, and a loss in the logits' dtype that keeps a tensor of
# their size.
ROWS = {
    "moments, copies, side stream": (
        "host", KEPT + COPIED + SIDE_STREAM, ["[]", "True True True", "True 1 0 True"],
    ),
    "loss": ("fake", LOSS, [json.dumps({each: [[each, [6]], [each, [6, 40]], True] for each in _DTYPES})]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_last_lines_of_a_script(environment: Environment, name: str) -> None:
    mode, script, expected = ROWS[name]
    ran = environment.run(script, mode)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-len(expected) :] == expected


def test_what_the_mapping_leaves_out_answers(environment: Environment) -> None:
    ran = environment.run(ASKED, "fake", MINDSPEED_LITE_DEVICE="npu")
    assert ran.returncode == 0, ran.stderr[-3000:]
    # There is no stub of CANN's profiler: the wheel logs that, and goes on.
    said = [line for line in ran.stdout.splitlines() if "libmsprofiler" not in line]
    assert said[-3:] == ["0 0 0 0", "1 1", "through True"], ran.stdout
    assert ran.stderr.count("npu-smi") == 3 and ran.stderr.count("--use-pytorch-profiler") == 1
    assert "Call range_start failed" not in ran.stderr + ran.stdout
