"""Work on a stream beside compute, through the wheel's own code: names, events, and bytes in their order."""

from __future__ import annotations

from tests.npu_contract.environment import Environment

BESIDE = """
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


def test_jobs_run_on_one_stream_that_is_not_computes(environment: Environment) -> None:
    ran = environment.run(BESIDE, "host")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "True 1 0 True"
