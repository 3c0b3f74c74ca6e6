"""grouped_matmul's Triton kernels: run by a GPU or by Triton's interpreter, and compiled for an H100."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.storage_cache import StorageVersionCache
from tests.harness.compare import error
from tests.ops.experts import DTYPES, SLACK, Problem

cuda = pytest.importorskip("mindspeed_lite.ops.grouped_matmul.cuda")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on tensors of the device on which kernels run here, and its result back."""

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [moved(each) for each in value]
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    def call(*args: Any) -> Any:
        return function(*map(moved, args)).to("cpu")

    return call


def rounding(dtype: torch.dtype) -> float:
    """Of a result; the interpreter cuts a float32 to bfloat16 where a GPU rounds, which is twice as much."""
    return torch.finfo(dtype).eps / (2 if HAS_GPU or dtype != torch.bfloat16 else 1)


CUDA_SHAPES = [
    ([3, 0, 5, 1], 33, 17),
    ([0, 0, 70], 16, 130),
    ([129, 0, 65], 130, 70),
    ([1], 1, 1),
]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("tiles", ["HUGE", "LARGE", "FLAT", "THIN", "WIDE"])
@pytest.mark.parametrize("transposed", [True, False])
def test_cuda_tiles_and_layouts(tiles: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_tiles", lambda *_: getattr(cuda, tiles))
    problem = Problem([0, 140, 3, 64, 0], 150, 90, torch.float32)
    weights = [each if transposed else each.t() for each in problem.weights]  # copied: kernels want rows
    with torch.no_grad():
        y = on_gpu(cuda.grouped_matmul)(
            problem.x.t().contiguous().t(), weights, torch.tensor(problem.counts), None, transposed
        )
    assert error(y, problem.exact()[0]) <= SLACK


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("counts", "n", "k"), CUDA_SHAPES)
def test_cuda_accumulates(counts: list[int], n: int, k: int, dtype: torch.dtype, same: bool) -> None:
    problem = Problem(counts, n, k, dtype)
    main_dtype = dtype if same else torch.float32
    before = torch.randn(len(counts), n, k, generator=torch.Generator().manual_seed(1)).to(main_dtype)
    main_grads = [each.to(DEVICE, copy=True) for each in before]
    versions = [each._version for each in main_grads]
    cuda.accumulate_weight_gradients(
        main_grads, problem.dy.to(DEVICE), problem.x.to(DEVICE), torch.tensor(counts).to(DEVICE)
    )
    exact = before.double() + problem.exact()[2]
    for main_grad, version, count, old, truth in zip(main_grads, versions, counts, before, exact, strict=True):
        assert main_grad._version > version
        assert error(main_grad.cpu(), truth) <= (rounding(dtype) if same else 0) + SLACK
        assert count or torch.equal(main_grad.cpu(), old)


@pytest.mark.usefixtures("triton_runs")
def test_cuda_tables_are_made_once_and_say_what_is_aligned() -> None:
    weights = [torch.zeros(4, 8, device=DEVICE) for _ in range(3)]
    table, aligned = cuda._addresses(weights)
    assert table.tolist() == [each.data_ptr() for each in weights] and table.device.type == DEVICE
    assert aligned and cuda._addresses(weights)[0] is table
    assert not cuda._addresses([torch.zeros(40, device=DEVICE)[1:]])[1]


@pytest.mark.skipif(not cuda._COUNTS_MANY, reason="this PyTorch counts writes to one tensor at a time")
def test_the_host_asks_once_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 143 us for 128 experts 50 were counts of writes, one by one, and 15 addresses."""
    calls: list[str] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: calls.append("kernel")

    monkeypatch.setattr(cuda, "gradient_kernel", Kernel())
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: calls.append("version"))
    monkeypatch.setattr("mindspeed_lite.ops.traced.address", lambda tensor: calls.append("address") or 0)
    main_grads = [torch.zeros(4, 8) for _ in range(16)]
    cuda.accumulate_weight_gradients(
        main_grads, torch.ones(16, 4), torch.ones(16, 8), torch.ones(16, dtype=torch.int64)
    )
    assert calls == ["kernel", "version"]


@pytest.mark.parametrize("cache", ["grouped_matmul", "adamw", "attention", "rope"])
def test_a_stream_reads_only_what_it_filled(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that another stream filled may not be there yet, and one that it evicts may be overwritten."""
    module = importlib.import_module({
        "grouped_matmul": "mindspeed_lite.ops.grouped_matmul.cuda", "adamw": "mindspeed_lite.ops.adamw.cuda",
        "attention": "mindspeed_lite.ops.attention.cuda_kernels", "rope": "mindspeed_lite.ops.storage_cache",
    }[cache])  # fmt: skip
    values, kept = torch.zeros(8), StorageVersionCache()
    lookups: dict[str, Callable[[], Any]] = {
        "grouped_matmul": lambda: module._addresses([values])[0],
        "adamw": lambda: module._addresses([[values]] * 5, None, values.device)[0],
        "attention": lambda: module.Ends.of((3, 5), (3, 5), values.device).q,
        "rope": lambda: kept.get(values, "double", lambda: values.double()),
    }
    found = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(module, "stream_id", lambda device, stream=stream: stream)
        found.append(lookups[cache]())
    assert found[0] is found[2] is not found[1]
