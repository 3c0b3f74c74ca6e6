import importlib
import sys

import pytest

from mindspeed_lite.engine import when_imported


def test_each_callback_fires_once_when_the_module_is_loaded_unless_cancelled(make_host):
    host = make_host({"mod": "x = 1\n"})
    seen = []
    handles = [when_imported(f"{host}.mod", lambda module, n=n: seen.append((n, module.x))) for n in range(3)]
    handles[1].cancel()
    assert seen == []
    loaded = importlib.import_module(f"{host}.mod")
    importlib.reload(loaded)
    assert seen == [(0, 1), (2, 1)]
    assert loaded.__spec__.loader.get_source(f"{host}.mod") == "x = 1\n"


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
