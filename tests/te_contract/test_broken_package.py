"""A package of Transformer Engine that cannot be imported counts as absent, and the reason is named once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import OptionError
from tests.harness import matrix
from tests.harness.processes import forked
from tests.te_contract.conftest import STAND_IN

# What release 2.20.2 raises, in its package and in its part for PyTorch: sources on the path, the wheel without its
# libraries, libraries without the extension, and an extension of another PyTorch.
BROKEN = {
    "sources": ("AssertionError('Could not find `transformer-engine`.')", ""),
    "wheel": ("RuntimeError('Found empty `transformer-engine` meta package installed.')", ""),
    "libraries": ("", "FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')"),
    "another torch": ("", "ImportError('transformer_engine_torch.so: undefined symbol: _ZN3c10')"),
}


def write(folder: Path, name: str) -> str:
    package, part = BROKEN[name]
    (folder / "transformer_engine" / "pytorch").mkdir(parents=True)
    for file, error in (("__init__.py", package), ("pytorch/__init__.py", part)):
        (folder / "transformer_engine" / file).write_text(f"raise {error}\n" if error else "__version__ = '2.20.2'\n")
    return str(folder)


@pytest.mark.parametrize("name", matrix.only(["sources"], [*BROKEN]))
@forked()
def test_it_is_absent_for_features_and_a_problem_for_megatron(tmp_path: Path, name: str) -> None:
    sys.path.insert(0, write(tmp_path, name))
    importlib.import_module("mindspeed_lite.megatron_adaptor")
    from mindspeed_lite.cli import doctor_checks
    from mindspeed_lite.dryrun import worker
    from mindspeed_lite.patches._shared import megatron_arguments

    error = eval(BROKEN[name][0] or BROKEN[name][1])
    assert megatron_arguments.fused_adam("cuda") == ""
    args = SimpleNamespace(transformer_impl="transformer_engine", apply_rope_fusion=True)
    with pytest.raises(OptionError, match=f"needs Transformer Engine, whose import fails .{type(error).__name__}: "):
        megatron_arguments.switch(args, "cuda", {"transformer_impl"})
    notices = " ".join(megatron_arguments.switch(args, "cuda", ()))
    assert args.transformer_impl == "local" and not args.apply_rope_fusion and notices.count(str(error)) == 1
    rows = [*doctor_checks._megatron_arguments(SimpleNamespace(device="cuda"))]
    assert [each[0] for each in rows] == ["problem", "note"] and str(error) in rows[0][1]
    # Megatron alone stops as well: it goes on only if the package's own import raises ImportError.
    with pytest.raises(type(error)):
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    # A dry run goes on without it.
    worker.hide_broken_engine()
    assert not importlib.import_module("megatron.core.models.gpt.gpt_layer_specs").HAVE_TE


@forked()
def test_the_stand_in_can_be_imported() -> None:
    sys.path.insert(0, str(STAND_IN))
    from mindspeed_lite.patches._shared import megatron_arguments

    assert megatron_arguments.import_error() is None and megatron_arguments.fused_adam("cuda") == "Transformer Engine"
