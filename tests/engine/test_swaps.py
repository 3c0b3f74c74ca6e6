"""Patches in and out of a host that is written for the test: what stays the same object, and all or nothing."""

import copy
import functools
import importlib
import inspect
import itertools
import pickle
import sys
import threading
import types

import pytest

from mindspeed_lite.engine import ApplyError, Around, Override, Provide, change, swaps
from mindspeed_lite.engine.swaps import in_force
from tests.harness.plans import applied, calling, feature, passing, swaps_of

SOURCE = """
    import functools
    import torch
    from textwrap import dedent
    def f(x): return x
    def g(x): return x * 10
    @functools.lru_cache
    def cached(x): return x
    FLAG = False

    class Base:
        def inherited(self): return 1

    class C(Base):
        def method(self, x=0): return x
        @staticmethod
        def static(x): return x
        cached = staticmethod(functools.lru_cache(len))
        @classmethod
        def make(cls, x=1): return cls, x
        @property
        def size(self): return 1
        @size.setter
        def size(self, value): self.set_to = value
        def up(self, x=0): return super().inherited() + x

    def enclose():
        scale = 2
        def closed(x):
            nonlocal scale
            scale += 1
            return x * scale
        return closed

    closed = enclose()
    closed.__qualname__ = "closed"
    def keywords(*, a, b=2): return (a, b)
    def everything(a, b=2, /, c=3, *rest, d, e=5, **more): return (a, b, c, rest, d, e, more)
    def spread(*args): return args
    def only(x, y=1, /): return x, y
    def counted(n):
        yield from range(n)
    @torch.no_grad()
    def quiet(x): return x, torch.is_grad_enabled()
    @torch.compile(backend="eager")
    def compiled(x): return x * 2
"""
USER = """
    from HOST.mod import f, f as alias, C
    from HOST.mod import g
    static = C.static
    call = lambda x: alias(x)
    class Holder:
        held = f
        class Inner:
            deep = alias
"""


def fused(x):
    return x + 100


def state_of(value):
    """What can change about a thing without changing its identity."""
    if isinstance(value, types.FunctionType):
        kept = {name: id(each) for name, each in vars(value).items()}
        return id(value.__code__), value.__defaults__, repr(value.__kwdefaults__), kept
    if isinstance(value, staticmethod | classmethod):
        return state_of(value.__func__)
    return state_of(value.fget) if isinstance(value, property) else None


class Host:
    """The modules of one host, and what all their dictionaries hold at the moment."""

    def __init__(self, name):
        self.name = name
        self.mod = importlib.import_module(f"{name}.mod")
        self.user = importlib.import_module(f"{name}.user")

    def at(self, path):
        return f"{self.name}.mod:{path}"

    def state(self):
        owners = [self.mod, self.user, self.mod.Base, self.mod.C, self.user.Holder, self.user.Holder.Inner]
        return {
            (id(owner), name): (id(value), state_of(value))
            for owner in owners
            for name, value in vars(owner).items()
            if not name.startswith("__")
        }


@pytest.fixture
def host(make_host):
    made = Host(make_host({"mod": SOURCE, "user": USER}))
    before = made.state()
    yield made
    assert made.state() == before, "the host is not what it was"


def named(letter):
    def make(wrapped, session):
        def wrapper(*args, **kwargs):
            return f"{letter}({wrapped(*args, **kwargs)})"

        return wrapper

    return make


# Functions: the object stays


def test_an_overridden_function_is_the_same_object_under_every_alias(host):
    before, user = host.mod.f, host.user
    with applied(feature("x", Override(host.at("f"), calling(fused)))):
        assert all(held is before for held in (host.mod.f, user.f, user.alias, user.Holder.held))
        assert user.Holder.Inner.deep is before and user.call(1) == before(1) == 101
    assert user.call(1) == before(1) == 1 and vars(before) == {} and vars(fused) == {}


NAMES = ["f", "closed", "keywords", "everything", "spread", "only", "quiet", "compiled"]


@pytest.mark.parametrize("name", NAMES)
def test_identity_pickle_and_copies_hold_before_during_and_after(host, name):
    function = getattr(host.mod, name)
    held = {"activation_func": function}

    def stays():
        assert getattr(host.mod, name) is function
        assert copy.deepcopy(held)["activation_func"] is copy.copy(function) is function
        if name != "closed":  # its code names the function that encloses it
            assert function.__name__ == name
        return pickle.loads(pickle.dumps(held))["activation_func"] is function

    signature = inspect.signature(function)
    assert stays()
    dumped = pickle.dumps(function)

    def make(wrapped, session):
        def wrapper(*args, **kwargs):
            return wrapped(*args, **kwargs)

        return wrapper

    with applied(feature("x", Around(host.at(name), make))):
        assert stays()
        assert pickle.loads(dumped) is function
        dumped = pickle.dumps(function)
        assert inspect.signature(function) == signature
        assert inspect.unwrap(function) is not function
    assert stays()
    assert pickle.loads(dumped) is function
    assert inspect.signature(function) == signature


def say(wrapped, session):
    def wrapper(*args, **kwargs):
        return "x", wrapped(*args, **kwargs)

    return wrapper


CALLS = [
    ("f", (1,), {}),
    ("f", (), {"x": 1}),
    ("keywords", (), {"a": 1, "b": 9}),
    ("everything", (1,), {"d": 4}),
    ("everything", (1, 9, 8, 7, 6), {"d": 4, "e": 3, "a": 2, "b": 1}),
    ("spread", (1, 2, 3), {}),
    ("only", (1,), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_every_kind_of_parameter_arrives_as_it_was_given(host, name, args, kwargs):
    function = getattr(host.mod, name)
    plain = function(*args, **kwargs)
    with applied(feature("x", Around(host.at(name), say))):
        assert function(*args, **kwargs) == ("x", plain)
        with pytest.raises(TypeError, match=rf"{name}\(\) (missing|takes|got|didn)"):
            function(*args, **kwargs, **{"c": 1, "d": 1} if name == "spread" else {"a": 1, "c": 1, "x": 1})
            function()


def test_an_override_may_take_keywords_that_its_target_does_not(host):
    def make(wrapped, session):
        def method(self, *args, **kwargs):
            return wrapped(self, *args) + kwargs.pop("more", 0)

        return method

    c = host.mod.C()
    with applied(feature("x", Override(host.at("C.method"), make))):
        assert c.method(1, more=2) == 3 and c.method() == 0
    with pytest.raises(TypeError, match="unexpected keyword"):
        c.method(1, more=2)
    with (
        applied(feature("x", Around(host.at("C.method"), passing))),
        pytest.raises(TypeError, match="unexpected keyword"),
    ):
        c.method(1, more=2)


def test_cells_generators_super_and_what_decorators_made_go_on_working(host):
    import torch

    paths = ("closed", "counted", "quiet", "compiled", "C.up")
    grad, closed = torch.ones(2, requires_grad=True), host.mod.closed
    assert closed(1) == 3
    with applied(feature("x", *(Around(host.at(path), say) for path in paths))):
        assert closed(1) == ("x", 4), "the cell is one for both"
        label, numbers = host.mod.counted(3)
        assert label == "x" and list(numbers) == [0, 1, 2]
        assert host.mod.quiet(1) == ("x", (1, False))
        label, doubled = host.mod.compiled(grad)
        assert label == "x" and torch.equal(doubled, grad * 2) and doubled.requires_grad
        assert host.mod.C().up(1) == ("x", 2)
    assert closed(1) == 5 and host.mod.quiet(1) == (1, False) and torch.equal(host.mod.compiled(grad), grad * 2)
    assert list(host.mod.counted(2)) == [0, 1] and host.mod.C().up(1) == 2


def test_what_another_function_compiled_follows_the_swap(host):
    import torch

    outer = torch.compile(lambda x: host.mod.g(x) + 1, backend="eager")
    x = torch.ones(2)
    assert torch.equal(outer(x), x * 11)

    def make(wrapped, session):
        def wrapper(x):
            return wrapped(x) * 2

        return wrapper

    for _ in range(2):
        with applied(feature("x", Around(host.at("g"), make))):
            assert torch.equal(outer(x), x * 21)
        assert torch.equal(outer(x), x * 11)


def test_methods_of_every_kind_stay_what_they_are(host):
    patches = [Around(host.at(f"C.{name}"), passing) for name in ("method", "static", "size")]

    def make(wrapped, session):
        return lambda cls, x=1: (wrapped(cls, x)[0], 7)

    raw = dict(vars(host.mod.C))
    bound = host.mod.C().method
    with applied(feature("x", *patches, Around(host.at("C.make"), make))):
        c = host.mod.C()
        assert (c.method(1), c.static(1), host.mod.C.static(1), c.size) == (2, 2, 2, 2)
        assert c.make() == (host.mod.C, 7) and host.user.static(1) == 2 and bound(1) == 2
        c.size = 5
        assert c.set_to == 5
        assert all(vars(host.mod.C)[name] is raw[name] for name in ("method", "static", "size", "make"))


def test_an_inherited_target_is_patched_where_it_is_defined(host):
    with applied(feature("x", Around(host.at("C.inherited"), passing))):
        assert host.mod.C().inherited() == host.mod.Base().inherited() == 2
        assert "inherited" not in vars(host.mod.C)


# Anything else: assigned where it is named


def test_a_value_and_a_cached_function_change_in_the_named_place_only(host):
    before = host.user.kept = host.mod.cached
    with applied(feature("x", Around(host.at("cached"), passing), Override(host.at("FLAG"), calling(True)))):
        assert host.mod.cached(1) == 2 and host.user.kept is before and host.mod.FLAG is True
    assert host.mod.cached is before and before.cache_info().hits == 0 and host.mod.FLAG is False
    del host.user.kept


@pytest.mark.parametrize("path", ["C", "C.cached"])
def test_what_others_may_hold_by_another_name_is_refused(host, path):
    with pytest.raises(ApplyError, match="no Python function"), applied(feature("x", Override(host.at(path), broken))):
        pass


def test_what_the_host_only_imported_changes_in_the_named_place_only(host):
    import textwrap

    def shout(text):
        return text.upper()

    with applied(feature("x", Override(host.at("dedent"), calling(shout)))):
        assert host.mod.dedent("a") == "A" and textwrap.dedent(" a") == "a"
    assert host.mod.dedent is textwrap.dedent


# Provided symbols


def test_a_symbol_is_provided_where_there_is_none_and_taken_away_again(host):
    patches = [
        Provide(host.at("FLAG"), lambda session: True),
        Provide(host.at("fast"), lambda session: fused),
    ]
    with applied(feature("x", *patches, Provide(host.at("f"), lambda session: fused))):
        assert host.mod.FLAG is True and host.mod.fast is fused and host.mod.f(1) == 1
    assert host.mod.FLAG is False and not hasattr(host.mod, "fast")


# Order


def test_patches_compose_around_the_override_in_their_order(host):
    features = [
        feature("a", Around(host.at("f"), named("a"), order=2)),
        feature("b", Around(host.at("f"), named("b"))),
        feature("c", Around(f"{host.name}.user:alias", named("c"), order=1)),
        feature("z", Override(host.at("f"), calling(fused), order=9)),
    ]
    for order in itertools.permutations(swaps_of(*features)):
        for each in order:
            change(add=[each])
        assert host.mod.f(1) == host.user.call(1) == "a(c(b(101)))", "whatever came first"
        change(remove=order)


# Another party


def test_a_party_that_wraps_ours_afterwards_keeps_working(host):
    ours = swaps_of(feature("x", Around(host.at("f"), named("x"))))
    original = host.mod.f
    change(add=ours)
    host.mod.f = lambda x: f"theirs({original(x)})"
    assert host.mod.f(1) == "theirs(x(1))" and host.user.call(1) == "x(1)"
    assert change(remove=ours) == [] and host.mod.f(1) == "theirs(1)"
    host.mod.f = original


def test_a_party_that_wrapped_before_stays_inside(host):
    original = host.mod.f

    @functools.wraps(original)
    def theirs(x):
        return f"theirs({original(x)})"

    host.mod.f = theirs
    with applied(feature("x", Around(host.at("f"), named("x")))):
        assert host.mod.f is theirs and host.mod.f(1) == "x(theirs(1))"
    assert host.mod.f(1) == "theirs(1)" and vars(theirs) == {"__wrapped__": original}
    host.mod.f = original


@pytest.mark.parametrize("path", ["cached", "f"])
def test_a_party_that_changes_an_attribute_or_the_code_since_is_left_alone_and_named(host, path):
    ours, original = swaps_of(feature("x", Around(host.at(path), passing))), getattr(host.mod, path)
    code = getattr(original, "__code__", None)
    change(add=ours)
    if code is None:
        host.mod.cached = lambda x: 77
    else:
        original.__code__ = (lambda x: 77).__code__
    (left,) = change(remove=ours)
    assert host.at(path) in left and getattr(host.mod, path)(1) == 77 and in_force() == []
    setattr(host.mod, path, original)
    if code is not None:
        original.__code__, original.__kwdefaults__ = code, None
        del original.__wrapped__


def test_nothing_is_added_over_a_party_that_came_between(host):
    first = swaps_of(feature("x", Around(host.at("cached"), passing)))
    second = swaps_of(feature("y", Around(host.at("g"), passing), Around(host.at("cached"), passing)))
    original = host.mod.cached
    change(add=first)
    theirs = host.mod.cached = lambda x: 77
    with pytest.raises(ApplyError, match=f"`y` could not around .*`{host.name}.mod:cached` was changed by another"):
        change(add=second)
    assert host.mod.cached is theirs and host.mod.g(1) == 10 and in_force() == first
    (left,) = change(remove=first)
    assert f"{host.name}.mod:cached" in left and host.mod.cached is theirs
    host.mod.cached = original


# All or nothing


def broken(wrapped, session):
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    "last",
    [
        lambda host: Around(host.at("g"), broken, order=9),
        lambda host: Around(host.at("g"), lambda w, s: lambda y: 1, order=9),
        lambda host: Around(host.at("g"), lambda w, s: 3, order=9),
        lambda host: Override(host.at("g"), lambda w, s: 3, order=9),
        lambda host: Around(host.at("cached"), lambda w, s: 3, order=9),
        lambda host: Provide(host.at("z"), lambda s: 1 / 0),
    ],
)
def test_a_failure_half_way_takes_everything_back_and_names_the_patch(host, last):
    before = host.state()
    patches = [
        Override(host.at("f"), calling(fused)),
        Around(host.at("C.method"), passing),
        Provide(host.at("a"), lambda s: 1),
    ]
    with pytest.raises(ApplyError, match=r"feature `y` could not .* `host") as caught:
        change(add=swaps_of(feature("x", *patches), feature("y", last(host))))
    assert last(host).target in str(caught.value) and caught.value.feature == "y"
    assert host.state() == before and in_force() == []
    assert fused.__name__ == "fused"


def everything_of(host, letter):
    """Every kind of place there is."""
    return [
        Override(host.at("f"), calling(fused)),
        Around(host.at("f"), named(letter)),
        Around(host.at("C.method"), named(letter)),
        Around(host.at("C.static"), named(letter)),
        Around(host.at("C.size"), named(letter)),
        Around(host.at("cached"), named(letter)),
        Around(host.at("compiled"), named(letter)),
        Override(host.at("FLAG"), calling(letter)),
        Override(host.at("dedent"), calling(lambda text: text)),
        Provide(host.at(f"new_{letter}"), lambda session: letter),
    ]


class _Injected(Exception):
    pass


def counting(count, then):
    """`then`, but call number `count` fails; `seen` says how many there were."""
    seen = itertools.count()

    @functools.wraps(then)
    def function(*args, **kwargs):
        if next(seen) == count:
            raise _Injected
        return then(*args, **kwargs)

    return function, seen


@pytest.mark.parametrize("standing", [False, True], ids=["alone", "over_another"])
@pytest.mark.parametrize("what", ["make", "write", "put", "then"])
def test_a_failure_at_any_step_of_a_change_changes_nothing(host, monkeypatch, what, standing):
    first = swaps_of(feature("a", *everything_of(host, "a"))) if standing else []
    change(add=first)
    before = host.state()
    for count in range(200):
        armed, seen = counting(count, {"write": swaps.write, "then": lambda: None}.get(what, swaps._Function.put))
        features = feature("b", *everything_of(host, "b"))
        if what == "make":
            # One counter for them all.
            armed, seen = counting(count, lambda: None)

            def armed_make(make, armed=armed):
                return lambda *args: (armed(), make(*args))[1]

            patches = [type(each)(each.target, armed_make(each.make)) for each in features.patches]
            features = feature("b", *patches)
        new = swaps_of(features)
        with monkeypatch.context() as patch:
            if what == "write":
                patch.setattr(swaps, "write", armed)
            elif what == "put":
                patch.setattr(swaps._Function, "put", armed)
            try:
                change(add=new, remove=first[:6], then=armed if what == "then" else None)
            except (ApplyError, _Injected) as error:
                assert isinstance(error, ApplyError) or what == "then"
            else:
                break
        assert host.state() == before, f"{what} {count}"
        assert {id(each) for each in in_force()} == {id(each) for each in first}
    assert next(seen) >= (1 if what == "then" else 3)
    change(remove=[*new, *first])


# Threads, growth, cost


def test_threads_may_call_a_function_while_it_is_swapped(host):
    features = feature(
        "x",
        Around(host.at("f"), named("x")),
        Around(host.at("everything"), say),
        Around(host.at("closed"), say),
        Around(host.at("C.make"), say),
    )
    stop, failed, calls = threading.Event(), [], [0, 0]

    def call(index):
        c = host.mod.C()
        while not stop.is_set():
            try:
                assert host.user.alias(1) in (1, "x(1)")
                found = host.mod.everything(1, 2, 3, 4, d=5, z=6)
                assert (found[1] if found[0] == "x" else found) == (1, 2, 3, (4,), 5, 5, {"z": 6})
                host.mod.closed(0)
                assert c.make(3) in ((host.mod.C, 3), ("x", (host.mod.C, 3)))
                calls[index] += 1
            except BaseException as error:
                failed.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    try:
        for thread in threads:
            thread.start()
        ours = swaps_of(features)
        for _ in range(40):
            change(add=ours)
            change(remove=ours)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed, failed
    assert min(calls) > 5
