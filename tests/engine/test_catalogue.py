import sys

import pytest

from mindspeed_lite.engine import Catalogue, CatalogueError, Option
from tests.harness.plans import feature

MODULE = """
    from mindspeed_lite.engine import Feature, Option
    FEATURE = Feature("{name}", "s", [Option("--{name}", "h")], "bitwise", [])
"""


def test_every_module_of_the_package_is_a_feature_except_underscored_ones(make_host):
    modules = {name: MODULE.format(name=name) for name in ("beta", "alpha")}
    package = make_host({**modules, "_shared": "raise SystemError"})
    catalogue = Catalogue.load(package)
    assert [each.name for each in catalogue] == ["alpha", "beta"]
    assert len(catalogue) == 2 and "beta" in catalogue and catalogue["beta"].name == "beta"
    assert [option.dest for option in catalogue.options()] == ["alpha", "beta"]
    assert f"{package}._shared" not in sys.modules


@pytest.mark.parametrize("source", ["x = 1", "import no_such_library"])
def test_a_wrong_module_is_an_error_that_names_the_file(make_host, source):
    with pytest.raises(CatalogueError, match=r"`one.py` in .* declares no feature \((Attribute|ModuleNotFound)Error"):
        Catalogue.load(make_host({"one": source}))


def test_a_flag_may_be_shared_only_if_it_is_the_same():
    shared = Option("--level", "h", default=1)
    a, b = (feature(name, options=[shared]) for name in "ab")
    assert Catalogue([a, b]).options() == (shared,)
    with pytest.raises(CatalogueError, match="`c` declares --level unlike another"):
        Catalogue([a, feature("c", options=[Option("--level", "h", default=2)])])
