"""torch_npu's stand-in, for the tests of every operator's NPU path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.dispatch import OPERATORS, operator

from . import twin


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m cuda` chooses what runs kernels on a CUDA device where there is one."""
    for item in items:
        needs_device = any(mark.kwargs.get("reason") == "no CUDA device" for mark in item.iter_markers("skipif"))
        fixtures = getattr(item, "fixturenames", ())
        if needs_device or ("triton_runs" in fixtures and "npu_twin" not in fixtures):
            item.add_marker(pytest.mark.cuda)


@pytest.fixture
def npu_twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[twin.Call]]:
    """torch_npu is the twin within the test; yields the calls that reach it."""
    calls: list[twin.Call] = []
    monkeypatch.setitem(sys.modules, "torch_npu", twin.torch_npu(calls))

    def forget() -> None:
        for name in OPERATORS:
            backend = operator(name).backends.get("npu")
            if backend is not None:
                sys.modules.pop(backend, None)
                # An import of the backend also leaves it as the package's attribute.
                vars(importlib.import_module(backend.removesuffix(".npu"))).pop("npu", None)
            operator(name)._chosen.clear()

    forget()
    yield calls
    forget()


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, or on CPU tensors by Triton's interpreter.

    The interpreter holds numbers in arrays of one element, which NumPy no longer takes for the end of a range, and
    bfloat16 as its bits, which its product takes for whole numbers.
    """
    if torch.cuda.is_available():
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    original = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
