import importlib
import sys

import pytest

from mindspeed_lite.engine import when_imported


def test_a_module_not_loaded_yet_fires_when_it_is_and_once_only(make_host):
    host = make_host({"mod": "x = 1\n"})
    seen = []
    when_imported(f"{host}.mod", lambda module: seen.append(module.x))
    assert seen == []
    loaded = importlib.import_module(f"{host}.mod")
    importlib.reload(loaded)
    assert seen == [1]
    assert loaded.__spec__.loader.get_source(f"{host}.mod") == "x = 1\n"


def test_several_callbacks_each_fire(make_host):
    host = make_host({})
    seen = []
    handles = [when_imported(host, lambda module, n=n: seen.append(n)) for n in range(3)]
    handles[1].cancel()
    importlib.import_module(host)
    assert seen == [0, 2]


def test_an_import_that_fails_fires_nothing_until_one_succeeds(make_host, tmp_path):
    host = make_host({"mod": "raise ValueError\n"})
    seen = []
    when_imported(f"{host}.mod", seen.append)
    with pytest.raises(ValueError):
        importlib.import_module(f"{host}.mod")
    assert seen == []
    (tmp_path / host / "mod.py").write_text("fine = True\n")
    importlib.invalidate_caches()
    importlib.import_module(f"{host}.mod")
    assert seen == [sys.modules[f"{host}.mod"]]
