"""The ceiling: measured figures are of the right size, and a data sheet counts only where no matmul beats it."""

import json

import pytest
import torch

from mindspeed_lite.bench import ceiling
from mindspeed_lite.bench.ceiling import Ceiling, stated

SLOW = Ceiling(1e12, 3e12, "measured: x")


@pytest.mark.parametrize("dtype", ceiling.DTYPES)
def test_the_command_measures_every_dtype_and_prints_json(dtype, monkeypatch, capsys):
    monkeypatch.setattr(ceiling, "_SIZES", (64, 128))
    monkeypatch.setattr(ceiling, "_MATMUL_SECONDS", 0.02)
    monkeypatch.setattr(ceiling, "_COPY_SECONDS", 0.02)
    monkeypatch.setattr(ceiling, "_COPY_BYTES", {"cpu": 1 << 22})
    ceiling.main("cpu", dtype, str(torch.get_num_threads()))
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"flops_per_second", "bytes_per_second", "source", "measured_flops_per_second"}
    assert 1e5 < found["flops_per_second"] < 1e14 and 1e6 < found["bytes_per_second"] < 1e13
    assert str(ceiling.DTYPES[dtype]).removeprefix("torch.") in found["source"] and "4 MiB" in found["source"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([1.0, 1.0, 16.0], (2 * 20**3, 20)), ([1e9, 1.0, 1.0], (2e-6, 10))],
    ids=["the best size wins", "no size is begun that would take too long"],
)
def test_a_matmul_counts_two_operations_and_a_copy_both_ways(seconds, expected, monkeypatch):
    monkeypatch.setattr(ceiling, "_SIZES", (10, 20, 40))
    monkeypatch.setattr(ceiling, "_MATMUL_SECONDS", 1e3)
    times = iter(seconds)
    monkeypatch.setattr(ceiling, "_best_seconds", lambda run, device, budget: next(times))
    assert ceiling._matmul("cpu", torch.float32) == expected
    monkeypatch.setattr(ceiling, "_best_seconds", lambda run, device, budget: 0.5)
    assert ceiling._copy("cpu", 100) == 400


@pytest.mark.parametrize(
    ("name", "flops", "word"),
    [
        ("1 x NVIDIA H100 80GB HBM3", 989.4e12, "H100"),
        ("8 x NVIDIA H200", 989.4e12, "H200"),
        ("1 x NVIDIA A100-SXM4-80GB", 312e12, "data sheet"),
        ("8 x Ascend910B2", 313e12, "Atlas 800T A2"),
    ],
)
def test_known_peaks(name, flops, word):
    found = stated(SLOW, name, torch.bfloat16)
    assert found.flops_per_second == flops and found.bytes_per_second == 3e12 and word in found.source


def test_a_peak_is_not_made_up_and_a_matmul_that_beats_the_data_sheet_wins():
    for name, dtype in (("AMD EPYC", torch.bfloat16), ("H100 PCIe", torch.bfloat16), ("H100 80GB", torch.float32)):
        assert stated(SLOW, name, dtype) is SLOW
    fast = Ceiling(990e12, 3e12, "measured: x")
    assert stated(fast, "NVIDIA H100", torch.bfloat16) is fast
