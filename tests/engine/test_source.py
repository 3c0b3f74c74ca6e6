"""What a target looks like in source and as loaded: fingerprints, other people's code, attributes, names."""

import importlib
import sys

import pytest

from mindspeed_lite.engine import Around, Override
from mindspeed_lite.engine.errors import FingerprintError
from mindspeed_lite.engine.source import (
    fingerprint,
    foreign_code,
    live_reader,
    reader_of,
)
from mindspeed_lite.engine.target import resolve
from tests.harness.plans import applied, calling, feature, passing

PLAIN = "def f(x, y=1, *, z):\n    total = x + 1\n    return total * y\n"
DRESSED = '''
# a comment
def f(
    x: "Tensor",
    y: int = 1,
    *,
    z,
) -> "Tensor":
    """What it does."""
    total: int = (x + 1)  # why

    return total*y
'''


@pytest.fixture
def of(tmp_path):
    """`of(source)` is the fingerprint of `f` in a module of that text."""

    def find(source, path="f"):
        (tmp_path / "file.py").write_text(source)
        # The reader remembers a file by its time and size.
        live_reader.__globals__["_parse"].cache_clear()
        return fingerprint(reader_of(tmp_path), f"file:{path}")

    return find


def test_layout_comments_annotations_and_docstrings_make_no_difference(of):
    assert of(PLAIN) == of(DRESSED)
    assert of(PLAIN).signature == "(x, y=, *, z)"
    assert len(of(PLAIN).body) == 16


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("x + 1", "x - 1"), ("y=1", "y=2"), ("def f", "@jit\ndef f")]
)
def test_a_changed_constant_operator_default_or_decorator_does(of, old, new):
    changed = of(PLAIN.replace(old, new))
    assert changed.body != of(PLAIN).body
    assert changed.signature == of(PLAIN).signature


def test_a_class_has_the_signature_of_its_constructor(of):
    assert of("class B:\n    def __init__(self, a): ...\nclass f(B):\n    pass\n").signature == "(self, a)"
    assert of("class f:\n    x: int\n").body != of("class f:\n    pass\n").body
    assert of("class f:\n    x: int = 1\n") == of("class f:\n    x: float = 1\n")


def test_all_definitions_count(of):
    both = "try:\n    import te\n    def f(a): return 1\nexcept ImportError:\n    def f(b): return 2\n"
    assert of(both).signature == "(a) | (b)"
    assert of(both).body != of(both.replace("return 2", "return 3")).body
    assert of("if fast:\n    f = g\nelse:\n    f = None\n").signature == ""


def test_what_is_not_defined_is_an_error(of):
    with pytest.raises(FingerprintError):
        of("def g(): pass\ndef h():\n    def f(): pass\n")


HELPERS = """
import torch
def deep(x): return x + 1
def helper(x): return deep(x)
def other(x): return x
class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return helper(x)
alias = Fused.apply
class Plain:
    def apply(self): return 1
def f(x): return helper(x)
def g(x): return Fused.apply(x)
def h(x): return Plain()
def loop(x): return loop(x) if x else 0
"""


@pytest.mark.parametrize(
    ("path", "change", "counts"),
    [
        ("f", ("x + 1", "x + 2"), True),
        ("f", ("return deep(x)", "return deep(x) * 2"), True),
        ("f", ("def other(x): return x", "def other(x): return 0"), False),
        ("f", ("return helper(x)\nalias", "return x\nalias"), False),
        ("g", ("return helper(x)\nalias", "return x\nalias"), True),
        ("g", ("x + 1", "x + 2"), True),
        ("alias", ("x + 1", "x + 2"), True),
        ("h", ("def apply(self): return 1", "def apply(self): return 2"), False),
        ("loop", ("else 0", "else 1"), True),
    ],
)
def test_the_body_covers_helpers_called_and_autograd_classes_applied(of, path, change, counts):
    assert change[0] in HELPERS
    changed = of(HELPERS.replace(*change), path)
    assert (changed.body != of(HELPERS, path).body) == counts
    assert changed.signature == of(HELPERS, path).signature


@pytest.fixture
def host(make_host):
    return make_host(
        {
            "__init__": "from .mod import f as g\n",
            "mod": f"{PLAIN}\nclass Base:\n    def method(self, a): return a\n",
            "sub": "from HOST.mod import Base as B\nfrom math import sqrt\nclass Child(B): pass\n",
        }
    )


def test_imports_and_bases_inside_the_package_are_followed(host, tmp_path):
    def at(target):
        return fingerprint(reader_of(tmp_path), f"{host}{target}")

    assert at(":g") == at(".mod:f")
    assert at(".sub:Child.method") == at(".mod:Base.method")
    assert at(".sub:sqrt").signature == ""
    for wrong in (".sub:Child.other", ".missing:f"):
        with pytest.raises(FingerprintError, match="has no definition in the source"):
            at(wrong)
    assert host not in sys.modules


CODE = """
    import functools
    import torch
    from math import sqrt
    def deco(f):
        @functools.wraps(f)
        def inner(*a): return f(*a)
        return inner
    def hiding(f):
        def inner(*a): return f(*a)
        return inner
    def f(x): return x
    def g(x): return x
    @deco
    def decorated(x): return x
    @hiding
    def hidden(x): return x
    @functools.lru_cache
    def cached(x): return x
    @torch.no_grad()
    def quiet(x): return x
    @torch.compile
    def compiled(x): return x
    @torch.jit.script
    def scripted(x: int): return x
    alias = f
    number = 3
    if number:
        def chosen(x): return 1
    else:
        def chosen(x): return 2
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x
    applied = Fused.apply
    class C:
        def method(self): return 1
        @staticmethod
        def static(x): return x
        @classmethod
        def make(cls): return cls
        @property
        def size(self): return 1
        @deco
        def dressed(self): return 1
    class D(C): pass
"""
PATHS = ["f", "decorated", "hidden", "cached", "quiet", "compiled", "scripted", "alias", "number", "chosen", "applied",
         "sqrt", "C", "C.method", "C.static", "C.make", "C.size", "C.dressed", "D.method", "Fused.forward"]  # fmt: skip


@pytest.fixture
def code(make_host):
    return make_host({"mod": CODE})


def foreign(host, path):
    target = resolve(f"{host}.mod:{path}")
    return foreign_code(target.text, target.raw)


@pytest.mark.parametrize("path", PATHS)
def test_what_the_module_defines_is_its_own(code, path):
    assert foreign(code, path) == ""


def other(*args):
    return 7


def test_code_that_another_party_changed_in_place_is_told(code):
    mod = importlib.import_module(f"{code}.mod")
    mod.f.__code__ = other.__code__
    mod.g.__code__ = mod.chosen.__code__
    mod.C.method = other
    mod.Fused.forward = staticmethod(other)
    assert "was replaced by" in foreign(code, "f") and "was replaced by" in foreign(code, "g")
    assert "was replaced by" in foreign_code(f"{code}.mod:f", mod.g), "one function of the module for another"
    assert foreign(code, "C") == foreign(code, "applied") == "has other code: tests.engine.test_source.other"
    assert foreign(code, "D") == ""


def test_ours_are_looked_past(code):
    paths = ["f", "cached", "compiled", "quiet", "C.method", "C.static", "C.size", "D.method", "decorated"]
    with applied(
        feature("x", *(Around(f"{code}.mod:{path}", passing) for path in paths)),
        feature("y", Override(f"{code}.mod:C.make", calling(lambda cls: 1))),
    ):
        assert [foreign(code, path) for path in PATHS] == [""] * len(PATHS)
