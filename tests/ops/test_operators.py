"""Every folder of an operator has what an operator has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_lite.ops import discovery, dispatch
from mindspeed_lite.ops.dispatch import OPERATORS, operator

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "mindspeed_lite" / "ops"
EVERY_OPERATOR = pytest.mark.parametrize("name", OPERATORS)


def test_folders_are_found_and_nothing_else() -> None:
    folders = {path.parent.name for path in OPS.glob("*/__init__.py")}
    assert set(OPERATORS) == folders - {"native"} and list(OPERATORS) == sorted(OPERATORS)
    assert all(package == f"mindspeed_lite.ops.{name}" for name, package in OPERATORS.items())
    assert dispatch.OPERATORS is discovery.OPERATORS
    with pytest.raises(ValueError, match="unknown operator 'sort'"):
        discovery.cases("sort")


@EVERY_OPERATOR
def test_it_has_its_files(name: str) -> None:
    folder, found = OPS / name, operator(name)
    assert found.name == name
    assert all((folder / file).is_file() for file in ("__init__.py", "reference.py", "cases.py"))
    backends = [each for each in ("cpu", "cuda", "npu") if (folder / f"{each}.py").is_file()]
    assert list(found.backends) == backends
    assert all(found.backends[each] == f"mindspeed_lite.ops.{name}.{each}" for each in backends)
    assert (ROOT / "tests" / "ops" / f"test_{name}.py").is_file()


@EVERY_OPERATOR
def test_what_calls_torch_npu_has_an_emulation_and_a_contract(name: str) -> None:
    backend = OPS / name / "npu.py"
    if not backend.is_file() or "torch_npu.npu_" not in backend.read_text(encoding="utf-8"):
        pytest.skip("no call of torch_npu")
    assert (ROOT / "tests" / "ops" / "twin" / f"{name}.py").is_file()
    assert (ROOT / "tests" / "npu_contract" / "operators" / f"{name}.py").is_file()


@EVERY_OPERATOR
def test_it_is_in_the_documentation(name: str) -> None:
    rows = re.findall(rf"^\| `{name}` \|.*$", (ROOT / "docs" / "support.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 1 and all(backend in rows[0] for backend in operator(name).backends)


@EVERY_OPERATOR
def test_its_cases_are_declared(name: str) -> None:
    declared = discovery.cases(name)
    assert declared.cpu and declared.accelerator and declared.quick and declared.tiny
    for text in (declared.example, *declared.cpu, *declared.accelerator, *declared.quick, *declared.tiny):
        for dtype in ("bf16", "fp64"):
            case = declared.case(text, "cpu", dtype)
            assert case.operator == name and case.name.endswith(dtype)
            assert case.forward.bytes > 0 and case.forward.flops >= 0
            assert case.both is None or case.both.bytes > case.forward.bytes


def test_cases_are_read_without_torch_and_triton() -> None:
    program = (
        "import sys\n"
        "from mindspeed_lite.ops.discovery import OPERATORS, cases\n"
        "for name in OPERATORS: cases(name).case(cases(name).example, 'cpu', 'bf16')\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        "from mindspeed_lite.ops.rms_norm import cases as module\n"
        "assert module.CASES is cases('rms_norm')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
