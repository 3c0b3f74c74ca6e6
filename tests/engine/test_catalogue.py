import sys

import pytest

from mindspeed_lite.engine import Catalogue, CatalogueError, Option, Relation
from tests.harness.plans import feature

MODULE = """
    from mindspeed_lite.engine import Feature, Option, Relation
    FEATURE = Feature("{name}", "s", [Option("--{name}", "h")], "bitwise", [], conflicts=[{relations}])
"""


def declare(name, relations=""):
    return MODULE.format(name=name, relations=relations)


def test_every_module_of_the_package_is_a_feature_except_underscored_ones(make_host):
    package = make_host({"beta": declare("beta"), "alpha": declare("alpha"), "_shared": "raise SystemError"})
    catalogue = Catalogue.load(package)
    assert [each.name for each in catalogue] == ["alpha", "beta"]
    assert len(catalogue) == 2 and "beta" in catalogue and catalogue["beta"].name == "beta"
    assert [option.dest for option in catalogue.options()] == ["alpha", "beta"]
    assert f"{package}._shared" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "declares no FEATURE"),
        (declare("other"), "declares feature `other`"),
        ("import no_such_library", "cannot be imported"),
        (declare("one", "Relation('missing', 'r')"), "names `missing`"),
    ],
)
def test_a_wrong_module_is_an_error_that_names_the_file(make_host, source, message):
    with pytest.raises(CatalogueError, match=message) as caught:
        Catalogue.load(make_host({"one": source}))
    assert "one" in str(caught.value)


def test_the_same_module_in_two_folders_of_one_package_is_an_error(make_host, tmp_path):
    package = make_host({"__init__": f"__path__.append({str(tmp_path / 'more')!r})", "one": declare("one")})
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one.py").write_text("")
    with pytest.raises(CatalogueError, match="another folder"):
        Catalogue.load(package)


def test_a_name_twice_is_an_error():
    with pytest.raises(CatalogueError, match="`x` is declared twice"):
        Catalogue([feature("x"), feature("x")])


def test_a_flag_may_be_shared_only_if_it_is_the_same():
    shared = Option("--level", "h", default=1)
    a, b = (feature(name, options=[shared]) for name in "ab")
    assert Catalogue([a, b]).options() == (shared,)
    c = feature("c", options=[Option("--level", "h", default=2)])
    with pytest.raises(CatalogueError, match="`a` and `c` declare --level differently"):
        Catalogue([a, c])


def test_a_relation_may_name_a_feature_outside_a_partial_catalogue():
    assert len(Catalogue([feature("x", conflicts=[Relation("y", "r")])])) == 1
