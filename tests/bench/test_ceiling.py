"""The ceiling: measured figures are of the right size, and a data sheet counts only where no matmul beats it."""

import json

import pytest
import torch

from mindspeed_lite.bench import ceiling
from mindspeed_lite.bench.ceiling import Ceiling, stated
from mindspeed_lite.bench.compose import higher_ceiling


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(ceiling, "_SIZES", (64, 128))
    monkeypatch.setattr(ceiling, "_MATMUL_SECONDS", 0.05)
    monkeypatch.setattr(ceiling, "_COPY_SECONDS", 0.05)
    monkeypatch.setattr(ceiling, "_COPY_BYTES", {"cpu": 1 << 22})


@pytest.mark.parametrize("dtype", ceiling.DTYPES.values())
def test_measures_every_dtype_and_says_what(small, dtype):
    found = ceiling.measure("cpu", dtype)
    assert 1e5 < found.flops_per_second < 1e14 and 1e6 < found.bytes_per_second < 1e13
    assert str(dtype).removeprefix("torch.") in found.source and "4 MiB" in found.source


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(ceiling, "_best_time", lambda run, device, budget: 0.5)
    assert ceiling._copy("cpu", 100) == 400


def test_a_matmul_counts_two_operations_and_the_best_size_wins(monkeypatch):
    monkeypatch.setattr(ceiling, "_SIZES", (10, 20, 40))
    seconds = iter([1.0, 1.0, 16.0])
    monkeypatch.setattr(ceiling, "_best_time", lambda run, device, budget: next(seconds))
    monkeypatch.setattr(ceiling, "_MATMUL_SECONDS", 1e9)
    assert ceiling._matmul("cpu", torch.float32) == (2 * 20**3, 20)


def test_no_size_is_begun_that_would_take_too_long(monkeypatch):
    monkeypatch.setattr(ceiling, "_SIZES", (10, 20, 40))
    begun = []
    monkeypatch.setattr(ceiling, "_best_time", lambda run, device, budget: begun.append(1) or 0.5)
    ceiling._matmul("cpu", torch.float32)
    assert len(begun) == 1


SLOW = Ceiling(1e12, 3e12, "measured: x")


@pytest.mark.parametrize(
    ("name", "dtype", "flops", "word"),
    [
        ("1 x NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12, "H100 SXM"),
        ("1 x NVIDIA H100 PCIe", torch.bfloat16, 756e12, "H100 PCIe"),
        ("8 x NVIDIA H200", torch.float16, 989.4e12, "H200 SXM"),
        ("1 x NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12, "A100"),
        ("1 x NVIDIA A100-SXM4-80GB", torch.float64, 19.5e12, "data sheet"),
        ("8 x Ascend910B2", torch.bfloat16, 353.9e12, "CANN"),
    ],
)
def test_known_peaks(name, dtype, flops, word):
    found = stated(SLOW, name, dtype)
    assert found.flops_per_second == flops and found.bytes_per_second == 3e12 and word in found.source


def test_a_peak_is_not_made_up_and_a_matmul_that_beats_the_data_sheet_wins():
    for name, dtype in (("AMD EPYC", torch.bfloat16), ("V100-SXM2", torch.bfloat16), ("Ascend910B2", torch.float32)):
        assert stated(SLOW, name, dtype) is SLOW
    fast = Ceiling(990e12, 3e12, "measured: x")
    assert stated(fast, "NVIDIA H100", torch.bfloat16) is fast


def test_of_two_measurements_the_higher_figures_count():
    one = {"flops_per_second": 2.0, "bytes_per_second": 5.0, "source": "one", "measured_flops_per_second": 2.0}
    other = {"flops_per_second": 3.0, "bytes_per_second": 4.0, "source": "other", "measured_flops_per_second": 3.0}
    best = {"flops_per_second": 3.0, "bytes_per_second": 5.0, "source": "other", "measured_flops_per_second": 3.0}
    assert higher_ceiling(one, other) == higher_ceiling(other, one) == best
    assert higher_ceiling(None, one) == higher_ceiling(one, None) == one and higher_ceiling(None, None) is None


def test_as_a_command_it_prints_json(small, capsys):
    threads = torch.get_num_threads()
    try:
        ceiling.main("cpu", "fp32", "1")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"flops_per_second", "bytes_per_second", "source", "measured_flops_per_second"}
