"""`torch.cuda` on a machine without an accelerator: what Megatron asks it for, and what torch itself must not see."""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
import time

import pytest
import torch
from torch.utils._device import _device_constructors

from mindspeed_lite import platform
from mindspeed_lite.platform import cpu
from tests.harness.processes import forked

MB = 2**20

ONE = torch.ones(1)
CUDA_NAMES = ("cuda", "cuda:0", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1))


def as_torch(source):
    """Run `source` as torch's own code would run, and return its names."""
    scope = {"__name__": "torch.utils._probe", "torch": torch}
    exec(source, scope)
    return scope


@forked()
def test_every_factory_and_method_takes_every_cuda_name():
    constructors = {each.__name__ for each in _device_constructors()}
    owners = {torch: {*cpu._FACTORIES, *constructors} & vars(torch).keys(), torch.Tensor: set(cpu._TENSOR_FACTORIES)}
    before = [(owner, name, getattr(owner, name)) for owner, names in owners.items() for name in names]
    platform.activate()
    assert len(before) > 40 and not [name for owner, name, own in before if getattr(owner, name) is own]
    for device in CUDA_NAMES:
        for made in (torch.empty(2, device=device), torch.tensor([1.0], device=device), torch.arange(3, device=device),
                     torch.full_like(ONE, 2.0, device=device), ONE.new_ones(2, device=device)):  # fmt: skip
            assert made.device.type == "cpu", device
        tensor = torch.arange(3.0)
        assert torch.equal(tensor.to(device), tensor)
        assert tensor.to(device=device, dtype=torch.float64).dtype == torch.float64
        assert torch.equal(tensor.cuda(device), tensor)
        assert torch.nn.Linear(2, 2, device=device).weight.device.type == "cpu"
        assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
    assert tensor.cuda() is tensor, "nothing is copied"
    assert tensor.cuda(non_blocking=True) is tensor
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    assert torch.fft.fftfreq(4, device="cuda").device.type == "cpu"
    with torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"
    assert torch.zeros(2, device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
    assert tensor.pin_memory() is tensor and tensor.record_stream(torch.cuda.current_stream()) is None


@forked()
def test_what_is_not_a_cuda_name_means_what_it_meant():
    platform.activate()
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.tensor([1.0]).is_meta and torch.arange(3).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert not torch.empty(2).is_meta
    other = torch.ones(1, dtype=torch.int16)
    assert torch.ones(2).to(other).dtype == torch.int16
    assert torch.ones(2).to(torch.float16, copy=True).dtype == torch.float16
    assert torch.tensor(True, device=None).item() is True


@forked()
def test_queries_answer_like_one_gpu_per_process():
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    platform.activate()
    cuda = torch.cuda
    assert cuda.is_available() and cuda.is_initialized() and cuda.is_bf16_supported()
    assert cuda.device_count() == 3
    cuda.set_device(2)
    cuda.synchronize()
    cuda.empty_cache()
    with cuda.device(1), cuda.device(cuda.current_device()):
        pass
    assert cuda.get_device_capability() == cuda.get_device_capability(0) == (8, 0)
    properties = cuda.get_device_properties(0)
    assert properties.name == cuda.get_device_name() and properties.name
    assert properties.total_memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (properties.major, properties.minor) == (8, 0) and properties.multi_processor_count >= 1
    assert cuda.utilization() == cuda.nvtx.range_push("x") == cuda.cudart().cudaProfilerStart() == 0
    with cuda.nvtx.range("x"):
        pass
    called = []
    cuda._lazy_call(lambda: called.append(1))
    assert called == [1]


@forked()
def test_type_names_are_those_of_a_gpu_for_scripts_and_torchs_own_for_torch():
    platform.activate()
    for dtype, name in (
        (torch.float16, "Half"),
        (torch.float64, "Double"),
        (torch.bool, "Bool"),
        (torch.uint8, "Byte"),
    ):
        tensor = torch.ones(1, dtype=dtype)
        assert tensor.type() == f"torch.cuda.{name}Tensor"
        assert torch.ones(1).type(f"torch.cuda.{name}Tensor").dtype == dtype
        assert torch.ones(1).type(getattr(torch.cuda, f"{name}Tensor")).dtype == dtype
        assert isinstance(tensor, getattr(torch.cuda, f"{name}Tensor"))
        assert as_torch(f"found = torch.ones(1, dtype={dtype}).type()")["found"] == f"torch.{name}Tensor"
    assert torch.ones(1).type(torch.int64).dtype == torch.int64


@forked()
def test_load_maps_cuda_locations_to_the_cpu(tmp_path):
    platform.activate()
    torch.save({"a": torch.arange(3.0)}, tmp_path / "a.pt")
    for location in ("cuda", "cuda:1", torch.device("cuda", 0), "cpu", None, lambda storage, where: storage):
        loaded = torch.load(tmp_path / "a.pt", map_location=location)["a"]
        assert torch.equal(loaded, torch.arange(3.0))
    assert torch.load(tmp_path / "a.pt", {"cpu": "cuda:0"}, weights_only=True)["a"].device.type == "cpu"
    assert torch.load(tmp_path / "a.pt", map_location="meta")["a"].is_meta


@forked()
def test_autocast_of_cuda_is_autocast_of_the_cpu():
    platform.activate()
    a = torch.randn(4, 4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=False):
        assert (a @ a).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


@forked()
def test_streams_keep_program_order_and_events_measure_time():
    platform.activate()
    cuda = torch.cuda
    side, start, end = cuda.Stream(priority=-1), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    with cuda.stream(side):
        time.sleep(0.05)
        done = side.record_event()
    side.wait_stream(cuda.current_stream())
    cuda.current_stream().wait_event(done)
    end.record(side)
    assert all(each.synchronize() is None and each.query() for each in (side, start, end))
    assert start.elapsed_time(end) >= 50
    assert start.elapsed_time(done) <= start.elapsed_time(end)
    assert cuda.Stream.priority_range() == (0, 0)
    # Megatron keeps `torch.cuda.stream(...)` and enters it again and again.
    default, context, elsewhere = cuda.current_stream(), cuda.stream(side), []
    for _ in range(2):
        with context, cuda.stream(default), side, cuda.stream(None), context:
            assert cuda.current_stream() is side
            worker = threading.Thread(target=lambda: elsewhere.append(cuda.current_stream()))
            worker.start()
            worker.join()
        assert cuda.current_stream() is default is elsewhere.pop()
    cuda.set_stream(side)
    assert cuda.current_stream() is side


@forked()
def test_memory_figures_are_those_of_the_process():
    platform.activate()
    cuda = torch.cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    block = torch.ones(200 * MB // 4)
    grown = cuda.memory_allocated() - before
    assert 190 * MB < grown < 215 * MB, grown
    assert cuda.max_memory_allocated() - before > 190 * MB
    assert cuda.memory_reserved() >= cuda.memory_allocated() - MB
    stats = cuda.memory_stats()
    assert abs(stats["allocated_bytes.all.current"] - cuda.memory_allocated()) < 5 * MB
    assert abs(stats["allocated_bytes.all.peak"] - cuda.max_memory_allocated()) < 5 * MB
    assert abs(cuda.memory.memory_allocated() - cuda.memory_allocated()) < 5 * MB
    del block
    assert cuda.memory_allocated() - before < 20 * MB, "a large block goes back to the system"
    assert cuda.max_memory_allocated() - before > 190 * MB, "the peak stays"
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() - before < 20 * MB, "until it is reset"
    free, total = cuda.mem_get_info()
    assert 0 < free < total


@forked()
def test_torchs_own_code_sees_the_machine_as_it_is():
    questions = ("is_available", "device_count", "is_initialized")
    truth = {name: getattr(torch.cuda, name)() for name in questions}
    accelerator = dict(vars(torch.accelerator)), torch.accelerator.current_accelerator()
    platform.activate()
    for name, answer in truth.items():
        assert as_torch(f"found = torch.cuda.{name}()")["found"] == answer, name
    assert torch.cuda.is_available()
    now = vars(torch.accelerator)
    assert set(now) == set(accelerator[0]) and all(now[name] is value for name, value in accelerator[0].items())
    assert torch.accelerator.current_accelerator() == accelerator[1]
    if not truth["is_available"]:
        from torch._dynamo.device_interface import CudaInterface

        assert not CudaInterface.is_available()
        assert not torch.backends.cuda.is_built() or not as_torch("a = torch.cuda.is_bf16_supported()")["a"]


OWNERS = (
    torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.random, torch.fft,
    torch.distributed, torch.distributed.distributed_c10d, torch.utils.data.DataLoader,
)  # fmt: skip


def state(owner):
    """Attributes, and what of functions the device layer changes."""
    parts = ("__code__", "__wrapped__")
    return {name: [value, *(getattr(value, part, None) for part in parts)] for name, value in vars(owner).items()}


def differences(before):
    return [
        (owner, key)
        for owner, own in zip(OWNERS, before, strict=True)
        for now in [state(owner)]
        for key in own.keys() | now.keys()
        if key not in own or key not in now or any(map(operator.is_not, own[key], now[key]))
    ]


@forked()
def test_undo_gives_back_every_attribute_by_identity():
    drawn, environment = torch.get_rng_state(), dict(os.environ)
    before = [state(owner) for owner in OWNERS]
    platform.activate()
    assert len(differences(before)) > 100, "this test looks where the changes are"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    platform.deactivate()
    assert differences(before) == []
    # Nothing is kept: later cycles, of some two hundred functions each, need no more memory.
    counts = []
    for times in (100, 200):
        for _ in range(times):
            platform.activate()
            platform.deactivate()
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[1] - counts[0] < 400, counts
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), drawn)
