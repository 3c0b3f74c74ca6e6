"""The dispatcher: choice, reasons, reports, forcing, and what it costs."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.attention import attention
from mindspeed_lite.ops.dispatch import Operator, force, on_fallback, selected
from mindspeed_lite.ops.rms_norm import OPERATOR as RMS_NORM


class Case(NamedTuple):
    device: str
    odd: bool = False


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    """Operator `double`: a counting cpu backend that refuses odd cases, and a cuda one that does not load."""
    module = types.ModuleType("fake_double_cpu")
    module.asked = 0  # type: ignore[attr-defined]

    def supported(case: Case) -> list[str]:
        module.asked += 1  # type: ignore[attr-defined]
        return ["odd", "and cold"] if case.odd else []

    module.supported = supported  # type: ignore[attr-defined]
    module.double = lambda x: 2 * x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_double_cpu", module)
    monkeypatch.setattr(dispatch, "_reported", set())
    monkeypatch.setattr(dispatch, "_subscribers", [])
    yield Operator("double", double, {"cpu": "fake_double_cpu", "cuda": "no_such_module_anywhere"})


def test_the_device_chooses_and_a_case_is_judged_once(op: Operator) -> None:
    module = sys.modules["fake_double_cpu"]
    for _ in range(3):
        assert op.choose(Case("cpu")) is module.double
    assert module.asked == 1


def test_a_device_without_a_backend_gets_the_reference_without_a_report(op: Operator) -> None:
    heard: list[object] = []
    on_fallback(lambda *what: heard.append(what))
    assert op.choose(Case("meta")) is double
    assert heard == []
    assert op.why_not(Case("meta")) == []


def test_a_fallback_is_reported_once_with_every_reason(op: Operator, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, str, tuple[str, ...]]] = []
    on_fallback(lambda *what: heard.append(what))
    with caplog.at_level(logging.WARNING, logger="mindspeed_lite"):
        for _ in range(3):
            assert op.choose(Case("cpu", odd=True)) is double
        op._chosen.clear()
        assert op.choose(Case("cpu", odd=True)) is double
    assert heard == [("double", "cpu", ("odd", "and cold"))]
    assert [record.getMessage() for record in caplog.records] == [
        "double: cpu falls back to the reference: odd; and cold"
    ]
    assert op.why_not(Case("cpu", odd=True)) == ["odd", "and cold"]


def test_a_subscriber_can_leave(op: Operator) -> None:
    heard: list[object] = []
    unsubscribe = on_fallback(lambda *what: heard.append(what))
    unsubscribe()
    unsubscribe()
    op.choose(Case("cpu", odd=True))
    assert heard == []


def test_a_subscriber_that_raises_stops_every_call(op: Operator) -> None:
    def strict(name: str, backend: str, reasons: tuple[str, ...]) -> None:
        raise LookupError(f"{name} {backend} {reasons}")

    unsubscribe = on_fallback(strict)
    for _ in range(2):
        with pytest.raises(LookupError, match="and cold"):
            op.choose(Case("cpu", odd=True))
    unsubscribe()
    assert op.choose(Case("cpu", odd=True)) is double


def test_a_backend_that_fails_to_import_is_a_reason(op: Operator) -> None:
    heard: list[tuple[str, str, tuple[str, ...]]] = []
    on_fallback(lambda *what: heard.append(what))
    assert op.choose(Case("cuda")) is double
    [(name, backend, (reason,))] = heard
    assert (name, backend) == ("double", "cuda")
    assert "no_such_module_anywhere failed to import: ModuleNotFoundError" in reason


def test_force_holds_inside_the_block_only() -> None:
    x, w = torch.randn(2, 8), torch.ones(8)
    before = RMS_NORM.choose(_rms_case(x, w))
    with force("rms_norm", "reference"):
        assert RMS_NORM.choose(_rms_case(x, w)) is RMS_NORM.reference
        with force("rms_norm", "cpu"):
            assert RMS_NORM.choose(_rms_case(x, w)) is before
        assert RMS_NORM.choose(_rms_case(x, w)) is RMS_NORM.reference
    assert RMS_NORM.choose(_rms_case(x, w)) is before


def test_a_forced_backend_never_falls_back() -> None:
    q = torch.zeros(4, 1, 1, 8, dtype=torch.int32)
    with force("attention", "cpu"), pytest.raises(RuntimeError, match="int32"):
        attention(q, q, q)
    with pytest.raises(RuntimeError, match="no backend of that name"), force("attention", "abacus"):
        pass


@pytest.mark.parametrize("op_name", sorted(dispatch.OPERATORS))
def test_the_table_names_unusable_backends(op_name: str) -> None:
    found = dispatch.operator(op_name)
    ours = list(found.backends)
    assert ours == [name for name in ("cpu", "cuda", "npu") if name in ours]
    assert found.unusable("reference") == [] and ("cpu" not in ours or found.unusable("cpu") == [])
    assert selected(op_name, "cpu") == ("cpu" if "cpu" in ours else "reference", ())
    assert selected(op_name, "meta") == ("reference", ())
    if "cuda" in ours and not torch.cuda.is_available():
        assert found.unusable("cuda") == ["no CUDA device"]
        assert selected(op_name, "cuda") == ("reference", ("cuda: no CUDA device",))


@pytest.mark.parametrize(
    "op_name", [name for name in sorted(dispatch.OPERATORS) if "npu" in dispatch.operator(name).backends]
)
def test_a_missing_torch_npu_is_named(op_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(dispatch, "importlib", types.SimpleNamespace(import_module=_except("torch_npu", gone)))
    assert dispatch.operator(op_name).unusable("npu") == ["torch_npu is not installed"]
    assert selected(op_name, "npu") == ("reference", ("npu: torch_npu is not installed",))
    with pytest.raises(RuntimeError, match="torch_npu is not installed"), force(op_name, "npu"):
        pass


def test_a_broken_torch_npu_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(dispatch, "importlib", types.SimpleNamespace(import_module=_except("torch_npu", broken)))
    assert RMS_NORM.unusable("npu") == [
        "torch_npu failed to import: OSError: libascendcl.so: cannot open shared object file"
    ]


def test_a_backend_is_imported_only_when_its_device_appears() -> None:
    program = (
        "import sys, torch\n"
        "from mindspeed_lite.ops.rms_norm import rms_norm\n"
        "from mindspeed_lite.ops.attention import attention\n"
        "loaded = lambda: sorted(m for m in sys.modules if m.startswith('mindspeed_lite.ops.')"
        " and m.rsplit('.', 1)[1] in ('cpu', 'cuda', 'npu'))\n"
        "assert loaded() == [], loaded()\n"
        "rms_norm(torch.ones(2, 4), torch.ones(4))\n"
        "assert loaded() == ['mindspeed_lite.ops.norm.cpu'], loaded()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _rms_case(x: torch.Tensor, w: torch.Tensor) -> object:
    from mindspeed_lite.ops.norm import Case

    return Case(x.device.type, x.dtype, w.dtype, False, False)


def _except(name: str, stand_in: Callable[[str], None]) -> Callable[[str], object]:
    from importlib import import_module

    return lambda wanted: stand_in(wanted) if wanted == name else import_module(wanted)
