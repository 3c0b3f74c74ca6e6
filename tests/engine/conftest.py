"""A host package written to disk for one test, and forgotten after it."""

import importlib
import itertools
import sys
import textwrap

import pytest

from mindspeed_lite.engine import change
from mindspeed_lite.engine.swaps import in_force

_number = itertools.count()


@pytest.fixture
def make_host(tmp_path, monkeypatch):
    """`make_host({"mod": source})` returns the name of a new package with those modules, importable."""
    names = []

    def make(modules, name=None):
        name = name or f"host{next(_number)}"
        folder = tmp_path / name
        folder.mkdir()
        names.append(name)
        for module, source in {"__init__": "", **modules}.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(source).replace("HOST", name))
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        return name

    yield make
    for key in [key for key in sys.modules if str(key).partition(".")[0] in names]:
        del sys.modules[key]


@pytest.fixture(autouse=True)
def nothing_stays_applied():
    yield
    left = in_force()
    change(remove=left)
    assert not left
