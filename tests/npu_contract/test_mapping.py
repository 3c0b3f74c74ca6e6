"""`torch.cuda` on the real wheel, once the device layer has chosen the NPU: every name that Megatron asks answers."""

from __future__ import annotations

from tests.npu_contract.environment import Environment

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


def test_what_the_mapping_leaves_out_answers(environment: Environment) -> None:
    ran = environment.run(ASKED, "fake", MINDSPEED_LITE_DEVICE="npu")
    assert ran.returncode == 0, ran.stderr[-3000:]
    # There is no stub of CANN's profiler: the wheel logs that, and goes on.
    said = [line for line in ran.stdout.splitlines() if "libmsprofiler" not in line]
    assert said[-3:] == ["0 0 0 0", "1 1", "through True"], ran.stdout
    assert ran.stderr.count("npu-smi") == 3 and ran.stderr.count("--use-pytorch-profiler") == 1
    assert "Call range_start failed" not in ran.stderr + ran.stdout
