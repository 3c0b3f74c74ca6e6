import importlib

import pytest

from mindspeed_lite.engine import TargetError, resolve
from mindspeed_lite.engine.target import vacancy

SOURCE = """
    from collections import OrderedDict
    from textwrap import dedent

    def function(x): return x
    constant = 3
    class Child: pass
    class Mapping(OrderedDict): pass
"""


@pytest.fixture
def host(make_host):
    return make_host(
        {
            "mod": SOURCE,
            "broken": "raise RuntimeError('no device')",
            "lazy": "def __getattr__(name): raise SystemError(name)",
        }
    )


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
        ("mod", "is not a target"),
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
