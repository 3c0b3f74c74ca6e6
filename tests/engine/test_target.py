import importlib
import inspect
import re
import sys
import types

import pytest

from mindspeed_lite.engine import TargetError, resolve
from mindspeed_lite.engine.target import (
    holders,
    namespace,
    parse,
    render_signature,
    signature_difference,
    vacancy,
)

SOURCE = """
    import functools
    from collections import OrderedDict

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


@pytest.fixture
def host(make_host):
    return make_host({"mod": SOURCE, "user": "from HOST.mod import function as g, Child\nclass A:\n    h = g\n"})


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
    assert target.raw is namespace(target.owner)[target.name]


def test_an_inherited_attribute_belongs_to_the_class_that_defines_it(host):
    target = resolve(f"{host}.mod:Child.inherited")
    assert target.owner is sys.modules[f"{host}.mod"].Base
    assert target.definer_text == f"{host}.mod:Base.inherited"


def test_an_attribute_inherited_from_another_package_is_refused(host):
    with pytest.raises(TargetError, match="outside"):
        resolve(f"{host}.mod:Mapping.popitem")


@pytest.mark.parametrize("path", ["nothing", "Child.nothing", "constant.real", "function.x"])
def test_what_is_not_there_is_a_target_error(host, path):
    with pytest.raises(TargetError, match="mod"):
        resolve(f"{host}.mod:{path}")


def test_a_module_that_cannot_be_imported_is_a_target_error(host, make_host):
    broken = make_host({"bad": "raise RuntimeError('no device')"})
    with pytest.raises(TargetError, match="no device"):
        resolve(f"{broken}.bad:f")
    with pytest.raises(TargetError, match="importing"):
        resolve(f"{host}.missing:f")


def test_lazy_module_attributes_are_not_triggered(make_host):
    host = make_host({"mod": "def __getattr__(name): raise SystemError(name)\n"})
    with pytest.raises(TargetError):
        resolve(f"{host}.mod:lazy")


def test_an_object_of_another_package_is_foreign(make_host):
    host = make_host({"mod": "from collections import OrderedDict\n"})
    assert resolve(f"{host}.mod:OrderedDict").is_foreign


def test_holders_finds_aliases_by_identity_in_modules_and_classes(host):
    user = importlib.import_module(f"{host}.user")
    mod = sys.modules[f"{host}.mod"]
    found = holders([mod.function, mod.Child], packages={host})
    assert sorted(name for _, name in found[id(mod.function)]) == ["function", "g", "h"]
    assert {(owner, name) for owner, name in found[id(mod.Child)]} == {(mod, "Child"), (user, "Child")}


def test_holders_triggers_nothing_lazy_and_tolerates_odd_modules(host, monkeypatch):
    mod = importlib.import_module(f"{host}.mod")

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise SystemError(f"touched {name}")

    class Proxy:
        @property
        def __class__(self):
            raise SystemError("touched")

    lazy = Lazy("lazy_entry")
    namespace(lazy)["alias"] = mod.function
    namespace(lazy)["proxy"] = Proxy()
    odd = {
        "lazy_entry": lazy,
        "odd_none": None,
        "odd_int": 3,
        "odd_class": Lazy,
        7: types.ModuleType("seven"),
    }
    for name, entry in odd.items():
        monkeypatch.setitem(sys.modules, name, entry)
    monkeypatch.setitem(namespace(mod), "proxy", Proxy())
    assert (lazy, "alias") in holders([mod.function], packages={host})[id(mod.function)]


def of(text):
    space = {}
    exec(f"def f({text}): pass", space)
    return space["f"]


def test_signatures_keep_names_kinds_and_defaults_only():
    parameters = inspect.signature(of("a: int, /, b: str = 'x', *rest: int, z, y=1, **more")).parameters.values()
    assert render_signature(parameters) == "(a, /, b=, *args, y=, z, **kwargs)"
    assert render_signature([]) == "()"


@pytest.mark.parametrize(
    ("original", "replacement", "fits"),
    [
        ("x, y=1", "x, y=2", True),
        ("x, y", "x, y=2", True),
        ("*args", "*rest", True),
        ("*, a, b", "*, b, a", True),
        ("x, clamp_value=None", "x", False),
        ("x", "x, extra=None", False),
        ("x, y", "y, x", False),
        ("x, y", "x, *, y", False),
        ("x, y=1", "x, y", False),
        ("x", "x, *args", False),
        ("x", "x, **kwargs", False),
        ("x, **kwargs", "x", False),
        # A wrapper may pass through what it does not name, and neither lose nor shift it.
        ("self, x, *, y=1", "*args, **kwargs", True),
        ("self, x, *, y=1", "self, *args, **kwargs", True),
        ("self, x, *, y=1", "self, x, *a, y=None, **k", True),
        ("self, x, *, y=1", "self", False),
        ("self, x, *, y=1", "self, y, *args, **kwargs", False),
        ("self, x, *, y=1", "self, *args", False),
        ("self, x, *, y=1", "self, x, y, *a, **k", False),
    ],
)
def test_a_replacement_is_callable_like_its_target_or_both_signatures_are_shown(original, replacement, fits):
    found = signature_difference(of(original), of(replacement))
    assert (found == "") == fits
    assert fits or re.fullmatch(r"the target takes \(.*\), the wrapper \(.*\)", found)


def test_the_name_of_self_does_not_matter():
    assert signature_difference(of("self, x"), of("module, x"), bound=True) == ""
    assert signature_difference(of("self, x"), of("module, x")) != ""


def test_a_vacancy_is_what_is_absent_none_or_false(make_host):
    host = make_host({"mod": "empty = None\noff = False\nfull = 0\n"})
    mod = importlib.import_module(f"{host}.mod")
    for name in ("empty", "off", "absent"):
        assert vacancy(f"{host}.mod:{name}") == (mod, name)
    assert vacancy(f"{host}.mod:full") is None
    assert vacancy(f"{host}.mod") is None and vacancy("json") is None
    assert vacancy("no_such_package") == (sys.modules, "no_such_package")
    assert vacancy("no_such_package.inner") == (sys.modules, "no_such_package.inner")
