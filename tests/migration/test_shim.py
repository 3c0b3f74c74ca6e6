"""The package that answers `import mindspeed.megatron_adaptor`, and never stands over a real one."""

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
assert megatron_adaptor is mindspeed.megatron_adaptor
"""


def python(code, *folders):
    path = ":".join(map(str, folders))
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{path}:{environment['PYTHONPATH']}"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_it_answers_the_import_line_and_says_what_it_is(tmp_path):
    package = write_shim(tmp_path)
    assert write_shim(tmp_path) == package, "again is no error"
    ran = python(IMPORTS, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("mindspeed.megatron_adaptor is mindspeed_lite's") == 1


def test_it_is_not_written_over_a_real_one(tmp_path, monkeypatch):
    real = tmp_path / "real"
    (real / "mindspeed").mkdir(parents=True)
    (real / "mindspeed" / "__init__.py").write_text("")
    with pytest.raises(FileExistsError, match="MindSpeed itself is there"):
        write_shim(real)
    (real / "mindspeed" / "__init__.py").unlink()
    (real / "mindspeed" / "core.py").write_text("")
    with pytest.raises(FileExistsError, match="MindSpeed itself is there"):
        write_shim(real)
    (real / "mindspeed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(real))
    with pytest.raises(FileExistsError, match="MindSpeed itself is there"):
        write_shim(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
