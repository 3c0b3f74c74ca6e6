"""Moments in host memory that an NPU addresses, through the wheel's own code: what is copied there comes back."""

from __future__ import annotations

from tests.npu_contract.environment import Environment

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


def test_numbers_are_kept_there_and_memory_is_given_back(environment: Environment) -> None:
    ran = environment.run(KEPT, "host")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "[]"
