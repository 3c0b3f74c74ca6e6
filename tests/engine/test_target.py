import importlib
import sys

import pytest

from mindspeed_lite.engine import TargetError, resolve
from mindspeed_lite.engine.target import (
    parse,
    vacancy,
)

SOURCE = """
    import functools
    from collections import OrderedDict
    from textwrap import dedent

    def function(x): return x
    @functools.lru_cache
    def cached(x): return x
    constant = 3

    class Base:
        def inherited(self): return 1

    class Child(Base):
        def method(self): return 2
        @staticmethod
        def static(): return 3
        @classmethod
        def make(cls): return cls
        @property
        def size(self): raise RuntimeError("computed")
        class Inner:
            def deep(self): return 4

    class Mapping(OrderedDict):
        pass
"""
BROKEN = "raise RuntimeError('no device')"
LAZY = "def __getattr__(name): raise SystemError(name)"


@pytest.fixture
def host(make_host):
    return make_host(
        {
            "mod": SOURCE,
            "broken": "raise RuntimeError('no device')",
            "lazy": "def __getattr__(name): raise SystemError(name)",
        }
    )


def test_parse_splits_module_and_path():
    assert parse("a.b:C.d") == ("a.b", ("C", "d"))
    assert parse("a.b") == ("a.b", ())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("function", "function"),
        ("constant", "int"),
        ("Child", "type"),
        ("Child.method", "function"),
        ("Child.static", "staticmethod"),
        ("Child.make", "classmethod"),
        ("Child.size", "property"),
        ("Child.Inner.deep", "function"),
    ],
)
def test_every_kind_of_attribute_is_found_raw(host, path, kind):
    target = resolve(f"{host}.mod:{path}")
    assert type(target.raw).__name__ == kind
    assert target.raw is vars(target.owner)[target.name]


def test_an_inherited_attribute_belongs_to_the_class_that_defines_it(host):
    target = resolve(f"{host}.mod:Child.inherited")
    assert target.owner is sys.modules[f"{host}.mod"].Base


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mod:nothing", "has no `nothing`"),
        ("mod:Child.nothing", "has no `nothing`"),
        ("mod:constant.real", "neither a module nor a class"),
        ("mod:function.x", "neither a module nor a class"),
        ("mod:Mapping.popitem", "outside"),
        ("broken:f", "no device"),
        ("missing:f", "importing"),
        ("lazy:lazy", "has no `lazy`"),
        ("mod", "names a module"),
    ],
)
def test_what_is_not_there_is_a_target_error(host, target, says):
    with pytest.raises(TargetError, match=says):
        resolve(f"{host}.{target}")


def test_an_object_of_another_package_is_foreign(host):
    assert resolve(f"{host}.mod:OrderedDict").is_foreign and resolve(f"{host}.mod:dedent").is_foreign
    assert not resolve(f"{host}.mod:function").is_foreign and not resolve(f"{host}.mod:constant").is_foreign


def test_a_vacancy_is_what_is_absent_none_or_false(make_host):
    host = make_host({"mod": "empty = None\noff = False\nfull = 0\n"})
    mod = importlib.import_module(f"{host}.mod")
    for name in ("empty", "off", "absent"):
        assert vacancy(f"{host}.mod:{name}") == (mod, name)
    assert vacancy(f"{host}.mod:full") is None
    assert vacancy(f"{host}.mod") is None and vacancy("json") is None
    assert vacancy("no_such_package") == (sys.modules, "no_such_package")
    assert vacancy("no_such_package.inner") == (sys.modules, "no_such_package.inner")
