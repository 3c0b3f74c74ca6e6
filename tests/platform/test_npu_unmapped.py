"""What Megatron asks of `torch.cuda` and torch_npu's mapping leaves out has a meaning on the NPU."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import types

import pytest
import torch

from mindspeed_lite.platform import npu, npu_unmapped
from mindspeed_lite.platform.redirect import Redirects
from tests.harness import fake_torch_npu


@pytest.fixture
def marked(monkeypatch):
    """On a machine with an NPU: what its markers were told."""
    told = []

    def begin(message, stream=None, domain="default"):
        told.append(("begin", message))
        return 100 + len(told)

    mstx = types.SimpleNamespace(
        range_start=begin,
        range_end=lambda number, domain="default": told.append(("end", number)),
        mark=lambda message, stream=None, domain="default": told.append(("mark", message)),
    )
    memory = {None: (30, 100), 1: (40, 200)}
    monkeypatch.setattr(
        torch,
        "npu",
        types.SimpleNamespace(
            mem_get_info=lambda device=None: memory[device],
            mstx=mstx,
            default_generators=(),
            _lazy_call=lambda call: call(),
        ),
        raising=False,
    )
    npu_unmapped._warn_once.cache_clear()
    redirects = Redirects()
    npu_unmapped.install(redirects)
    yield told
    redirects.close()


def test_memory_used_is_that_of_the_device(marked):
    assert torch.cuda.device_memory_used() == 70
    assert torch.cuda.device_memory_used(1) == 160


def test_ranges_nest_and_have_cudas_depths(marked):
    nvtx = torch.cuda.nvtx
    assert (nvtx.range_push("step"), nvtx.range_push("forward")) == (0, 1)
    with nvtx.range("layer {}", 3):
        nvtx.mark("here")
    assert (nvtx.range_pop(), nvtx.range_pop(), nvtx.range_pop()) == (1, 0, -1)
    assert marked == [
        ("begin", "step"), ("begin", "forward"), ("begin", "layer 3"), ("mark", "here"),
        ("end", 103), ("end", 102), ("end", 101),
    ]  # fmt: skip


def test_ranges_of_threads_do_not_mix(marked):
    torch.cuda.nvtx.range_push("ours")
    depths = []
    thread = threading.Thread(target=lambda: depths.append(torch.cuda.nvtx.range_pop()))
    thread.start()
    thread.join()
    assert depths == [-1] and torch.cuda.nvtx.range_pop() == 0
    number = torch.cuda.nvtx.range_start("by number")
    torch.cuda.nvtx.range_end(number)
    assert marked[-1] == ("end", number)


def test_gauges_without_a_counterpart_read_zero_and_say_so_once(marked, caplog):
    with caplog.at_level(logging.WARNING, "mindspeed_lite"):
        for _ in range(2):
            assert (torch.cuda.temperature(), torch.cuda.power_draw(0), torch.cuda.clock_rate()) == (0, 0, 0)
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and all("npu-smi" in text for text in said[:3]) and "power draw" in said[1]
    assert "--use-pytorch-profiler" in said[3]


def test_it_comes_with_the_mapping_and_leaves_what_that_maps(monkeypatch, tmp_path):
    transfer = "import torch\ntorch.cuda.temperature = lambda device=None: 41\n"
    monkeypatch.syspath_prepend(fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.WORKS, transfer=transfer))
    for name in ("temperature", "power_draw"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in ("npu", "distributed.is_hccl_available"):
        owner, _, attribute = name.rpartition(".")
        monkeypatch.setattr(getattr(torch, owner) if owner else torch, attribute, None, raising=False)
    importlib.invalidate_caches()
    redirects, own = Redirects(), (torch.cuda.power_draw, torch.cuda.default_generators)
    try:
        npu.install(redirects)
        assert torch.cuda.temperature() == 41 and torch.cuda.power_draw() == 0
        assert torch.cuda.default_generators == ("of npu 0", "of npu 1")
    finally:
        redirects.close()
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
            del sys.modules[name]
    assert (torch.cuda.power_draw, torch.cuda.default_generators) == own
