"""Packages that answer the import of MindSpeed's megatron_adaptor, and never replace a real one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindspeed_lite.migration.shim import write_shim
from tests.harness.processes import clean_environment

IMPORTS = """
import sys, types
stand_in = types.ModuleType("mindspeed_lite.megatron_adaptor")
import mindspeed_lite
sys.modules["mindspeed_lite.megatron_adaptor"] = mindspeed_lite.megatron_adaptor = stand_in
from mindspeed import megatron_adaptor
import mindspeed.megatron_adaptor
from mindspeed_llm import megatron_adaptor as of_llm
assert megatron_adaptor is mindspeed.megatron_adaptor
"""


def python(code, *folders):
    path = ":".join(map(str, folders))
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{path}:{environment['PYTHONPATH']}"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_it_answers_the_import_line_and_says_what_it_is(tmp_path):
    packages = write_shim(tmp_path)
    assert write_shim(tmp_path) == packages, "again is no error"
    ran = python(IMPORTS, tmp_path)
    assert ran.returncode == 0, ran.stderr
    for name in ("mindspeed", "mindspeed_llm"):
        assert ran.stderr.count(f"{name}.megatron_adaptor is mindspeed_lite's") == 1


def test_it_is_not_written_over_a_real_one(tmp_path, monkeypatch):
    real = tmp_path / "real"
    (real / "mindspeed").mkdir(parents=True)
    (real / "mindspeed" / "__init__.py").write_text("")
    with pytest.raises(FileExistsError, match="mindspeed itself is installed"):
        write_shim(real)
    (real / "mindspeed" / "__init__.py").unlink()
    (real / "mindspeed" / "core.py").write_text("")
    with pytest.raises(FileExistsError, match="mindspeed itself is installed"):
        write_shim(real)
    (real / "mindspeed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(real))
    with pytest.raises(FileExistsError, match="mindspeed itself is installed"):
        write_shim(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
