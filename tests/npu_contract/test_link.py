"""Copies between an NPU and its host by streams, through the wheel's own code: names, events, pinned memory, bytes."""

from __future__ import annotations

from tests.npu_contract.environment import Environment

COPIED = """
import torch
from mindspeed_lite.memory.copy_engine import CopyEngine, PinnedBufferPool, as_bytes

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
print(buffer.tensor.is_pinned(), torch.equal(buffer.tensor.view(torch.int32), numbers), end=" ")
print(torch.equal(again.cpu().view(torch.int32), numbers), flush=True)
"""


def test_bytes_go_out_and_come_back(environment: Environment) -> None:
    ran = environment.run(COPIED, "host")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "True True True"
