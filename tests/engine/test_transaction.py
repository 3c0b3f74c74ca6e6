import functools
import gc
import importlib
import inspect
import pickle
import sys
import timeit
import tracemalloc
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_lite.engine import ApplyError, Provide, Replace, UndoError, Wrap, when_imported
from mindspeed_lite.engine.target import namespace
from tests import matrix

from .support import applied, feature, passing, transaction_of

SOURCE = """
    import functools
    from collections import OrderedDict
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
        @classmethod
        def make(cls, x=1): return cls, x
        @property
        def size(self): return 1
        @size.setter
        def size(self, value): self.set_to = value
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
LATE = "from HOST.mod import f as late, C as D\nclass Keeps:\n    kept = late\n"


def fused(x):
    return x + 100


class Host:
    """The modules of one host, and what all their dictionaries hold at the moment."""

    def __init__(self, name):
        self.name = name
        self.mod = importlib.import_module(f"{name}.mod")
        self.user = importlib.import_module(f"{name}.user")

    def at(self, path):
        return f"{self.name}.mod:{path}"

    def late(self):
        return importlib.import_module(f"{self.name}.late")

    def state(self):
        owners = [self.mod, self.user, self.mod.Base, self.mod.C, self.user.Holder, self.user.Holder.Inner]
        return {
            (id(owner), name): id(value)
            for owner in owners
            for name, value in namespace(owner).items()
            if not name.startswith("__")
        }


@pytest.fixture
def host(make_host):
    made = Host(make_host({"mod": SOURCE, "user": USER, "late": LATE}))
    before = made.state()
    yield made
    assert made.state() == before, "the host is not what it was"


def test_a_replacement_is_the_very_function_under_every_alias(host):
    with applied(feature("x", Replace(host.at("f"), fused))) as transaction:
        user = host.user
        assert all(held is fused for held in (host.mod.f, user.f, user.alias, user.Holder.held))
        assert user.Holder.Inner.deep is fused and user.call(1) == 101
        (step,) = transaction.plan.steps
        assert transaction.placed(step)[1] == sorted(
            f"{host.name}.user:{name}" for name in ("Holder.Inner.deep", "Holder.held", "alias", "f")
        )
    assert user.call(1) == 1 and not hasattr(fused, "__wrapped__")


def test_modules_imported_after_apply_are_restored_too(host):
    original = host.mod.f
    with applied(feature("x", Replace(host.at("f"), fused), Wrap(host.at("g"), passing))):
        late = host.late()
        assert late.late is fused and late.Keeps.kept is fused
    assert late.late is original and late.Keeps.kept is original
    del sys.modules[f"{host.name}.late"]


def test_the_home_of_a_replacement_keeps_it(host):
    with applied(feature("x", Replace(host.at("f"), fused))):
        pass
    assert fused(1) == 101 and fused is globals()["fused"]


def test_methods_of_every_kind_stay_what_they_are(host):
    patches = [Wrap(host.at(f"C.{name}"), passing) for name in ("method", "static", "size")]

    def make(wrapped, session):
        return lambda cls, x=1: (wrapped(cls, x)[0], 7)

    with applied(feature("x", *patches, Wrap(host.at("C.make"), make))):
        c = host.mod.C()
        assert (c.method(1), c.static(1), host.mod.C.static(1), c.size) == (2, 2, 2, 2)
        assert c.make() == (host.mod.C, 7) and host.user.static(1) == 2
        c.size = 5
        assert c.set_to == 5
        assert isinstance(vars(host.mod.C)["make"], classmethod)


def test_replacements_become_the_descriptor_the_target_is(host):
    def make(cls, x=1):
        return cls, 8

    def size(self):
        return 9

    with applied(
        feature(
            "x",
            Replace(host.at("C.make"), make),
            Replace(host.at("C.size"), size),
            Replace(host.at("C.static"), staticmethod(fused)),
        )
    ):
        c = host.mod.C()
        assert (c.make(), c.size, c.static(1)) == ((host.mod.C, 8), 9, 101)


def test_an_inherited_target_is_patched_where_it_is_defined(host):
    with applied(feature("x", Wrap(host.at("C.inherited"), passing))):
        assert host.mod.C().inherited() == host.mod.Base().inherited() == 2
        assert "inherited" not in vars(host.mod.C)


def test_a_class_and_a_value_can_be_replaced(host):
    class Better(host.mod.C):
        pass

    with applied(feature("x", Replace(host.at("C"), Better), Replace(host.at("FLAG"), True))):
        assert host.user.C is Better and host.mod.FLAG is True
        host.late()


def test_a_class_made_by_a_wrap_is_pickled_under_the_name_of_the_target(host):
    def subclass(wrapped, session):
        class Patched(wrapped):
            pass

        return Patched

    with applied(feature("x", Wrap(host.at("C"), subclass))):
        made = pickle.loads(pickle.dumps(host.mod.C()))
        assert type(made) is host.mod.C


def test_an_object_the_host_only_imported_changes_in_the_named_place_only(host):
    import collections

    class Mine(collections.OrderedDict):
        pass

    with applied(feature("x", Replace(host.at("OrderedDict"), Mine))):
        assert host.mod.OrderedDict is Mine and collections.OrderedDict is not Mine


def test_a_wrapper_looks_like_what_it_wraps(host):
    before = inspect.signature(host.mod.f)
    original = host.mod.f
    with applied(feature("x", Wrap(host.at("f"), passing))):
        wrapper = host.mod.f
        assert (wrapper.__name__, wrapper.__module__) == ("f", f"{host.name}.mod")
        assert inspect.signature(wrapper) == before and wrapper.__wrapped__ is original
        assert pickle.loads(pickle.dumps(wrapper)) is wrapper


def test_a_cached_function_keeps_its_cache_under_a_wrap(host):
    with applied(feature("x", Wrap(host.at("cached"), passing))):
        assert host.mod.cached(1) == host.mod.cached(1) == 2
    assert host.mod.cached.cache_info().hits == 1


def named(letter):
    def around(wrapped, session):
        def wrapper(*args, **kwargs):
            return f"{letter}({wrapped(*args, **kwargs)})"

        return wrapper

    return around


def test_wraps_compose_around_the_replacement_in_their_order(host):
    features = [
        feature("a", Wrap(host.at("f"), named("a"), order=2)),
        feature("b", Wrap(host.at("f"), named("b"))),
        feature("c", Wrap(f"{host.name}.user:alias", named("c"), order=1)),
        feature("z", Replace(host.at("f"), fused)),
    ]
    with applied(*features):
        assert host.mod.f(1) == host.user.call(1) == "a(c(b(101)))"


def test_around_is_called_once_with_the_raw_function_and_the_session(host):
    calls = []

    def around(wrapped, session):
        calls.append((wrapped, session))
        return wrapped

    raw = vars(host.mod.C)["static"].__func__
    with applied(feature("x", Wrap(host.at("C.static"), around))) as transaction:
        host.mod.C.static(1)
        assert calls == [(raw, transaction.session)] and transaction.journal == []


def broken(wrapped, session):
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    "last",
    [
        lambda host: Wrap(host.at("g"), broken, order=9),
        lambda host: Wrap(host.at("g"), lambda w, s: lambda y: 1, order=9),
        lambda host: Wrap(host.at("g"), lambda w, s: 3, order=9),
        lambda host: Provide(host.at("z"), lambda s: 1 / 0),
    ],
)
def test_a_failure_half_way_takes_everything_back_and_names_the_patch(host, last):
    before = host.state()
    patches = [
        Replace(host.at("f"), fused),
        Wrap(host.at("C.method"), passing),
        Provide(host.at("a"), lambda s: 1),
    ]
    transaction = transaction_of(feature("x", *patches), feature("y", last(host)))
    with pytest.raises(ApplyError, match=r"feature `y` could not .* `host") as caught:
        transaction.apply()
    assert last(host).target in str(caught.value)
    assert host.state() == before and not transaction.active and transaction.journal == []
    assert globals()["fused"].__name__ == "fused", "the home of a replacement keeps it"


def test_a_failing_write_takes_everything_back(host):
    before = host.state()
    transaction = transaction_of(
        feature("x", Replace(host.at("f"), fused), Wrap(host.at("C.method"), passing)),
    )
    write, count = transaction._write, []

    def fail_third(*arguments):
        count.append(1)
        if len(count) == 3:
            raise TypeError("immutable")
        write(*arguments)

    transaction._write = fail_third
    with pytest.raises(ApplyError, match="immutable"):
        transaction.apply()
    assert host.state() == before


def test_applying_twice_is_refused_and_undoing_twice_does_nothing(host):
    transaction = transaction_of(feature("x", Replace(host.at("f"), fused)))
    transaction.apply()
    with pytest.raises(ApplyError, match="already"):
        transaction.apply()
    assert transaction.undo() == [] and transaction.undo() == []


def test_a_function_with_a_home_of_its_own_is_not_renamed_by_a_wrap(host):
    with applied(feature("x", Wrap(host.at("f"), lambda wrapped, session: fused))):
        assert host.mod.f is fused
    assert fused.__name__ == "fused" and not hasattr(fused, "__wrapped__")


def test_what_someone_else_changed_since_is_left_alone_and_named(host):
    original = host.mod.f
    transaction = transaction_of(feature("x", Replace(host.at("f"), fused)))
    transaction.apply()
    host.mod.f = len
    (left,) = transaction.undo()
    assert f"{host.name}.mod:f" in left and host.mod.f is len
    host.mod.f = original
    assert host.user.alias is original


def test_two_sessions_compose_and_come_off_last_first(host):
    first = transaction_of(feature("x", Replace(host.at("f"), fused), Wrap(host.at("g"), named("1"))))
    first.apply()
    second = transaction_of(feature("y", Wrap(host.at("f"), passing), Wrap(host.at("g"), named("2"))))
    second.apply()
    assert host.user.call(1) == 102 and host.user.g(1) == "2(1(10))" and fused(1) == 101
    with pytest.raises(UndoError, match="latest first"):
        first.undo()
    late = host.late()
    assert late.late(1) == 102
    assert second.undo() == [] and host.user.call(1) == 101 and late.late is fused
    assert first.undo() == [] and late.late is host.mod.f


def test_sessions_on_different_targets_come_off_in_any_order(host):
    first = transaction_of(feature("x", Replace(host.at("f"), fused)))
    second = transaction_of(feature("y", Wrap(host.at("g"), passing)))
    first.apply()
    second.apply()
    assert first.undo() == second.undo() == []


def test_one_replacement_for_two_targets_is_told_apart_by_name(host):
    f, g = host.mod.f, host.mod.g
    with applied(feature("x", Replace(host.at("f"), fused), Replace(host.at("g"), fused))) as transaction:
        late = types.ModuleType("late")
        sys.modules[f"{host.name}.more"] = late
        late.f = late.g = late.other = fused
        (left,) = transaction.undo()
    assert (late.f, late.g, late.other) == (f, g, fused) and "late:other" in left


def test_one_function_of_the_host_can_stand_in_for_another(host):
    f, g = host.mod.f, host.mod.g
    first = transaction_of(feature("x", Replace(host.at("f"), g)))
    first.apply()
    assert host.mod.f is host.user.alias is g
    late = importlib.import_module(f"{host.name}.late")
    late.other = g
    second = transaction_of(feature("y", Wrap(host.at("f"), named("f"))), feature("z", Wrap(host.at("g"), passing)))
    second.apply()
    assert host.user.call(1) == "f(10)" and host.user.g(1) == host.mod.g(1) == 11
    second.undo()
    assert host.user.call(1) == 10 and host.user.g is host.mod.g is g
    assert first.undo() == [] and host.mod.f is f and host.user.g is late.other is g


def test_a_symbol_is_provided_where_there_is_none_and_taken_away_again(host):
    patches = [
        Provide(host.at("FLAG"), lambda session: True),
        Provide(host.at("fast"), lambda session: fused),
    ]
    with applied(feature("x", *patches, Provide(host.at("f"), lambda session: fused))) as transaction:
        assert host.mod.FLAG is True and host.mod.fast is fused and host.mod.f(1) == 1
        notes = {step.patch.target: transaction.placed(step)[0] for step in transaction.plan.steps}
        assert notes[host.at("fast")] == "provided"
        assert notes[host.at("f")] == "already provided by the host"
    assert host.mod.FLAG is False and not hasattr(host.mod, "fast")


def test_a_module_is_provided_only_if_it_cannot_be_found(host):
    value = types.ModuleType("absent_host.inner")
    patches = [
        Provide("absent_host", lambda session: types.ModuleType("absent_host")),
        Provide("absent_host.inner", lambda session: value),
        Provide("json", lambda session: value),
    ]
    with applied(feature("x", *patches)):
        import absent_host.inner

        assert absent_host.inner is value and sys.modules["json"] is not value
        assert importlib.util.find_spec("absent_host") is not None
    assert not {"absent_host", "absent_host.inner"} & set(sys.modules)


def test_a_copy_of_a_provided_symbol_is_named_at_undo(host):
    transaction = transaction_of(feature("x", Provide(host.at("fast"), lambda session: fused)))
    transaction.apply()
    host.user.fast = fused
    (left,) = transaction.undo()
    assert f"{host.name}.user:fast" in left
    del host.user.fast


def test_a_patch_may_wait_for_its_module(make_host):
    host = make_host({"mod": "def f(x): return x\n"})
    transactions = []

    def put(found):
        transaction = transaction_of(feature("x", Replace(f"{host}.mod:f", fused)))
        transaction.apply()
        transactions.append(transaction)

    when_imported(f"{host}.mod", put)
    assert importlib.import_module(f"{host}.mod").f is fused
    transactions[0].undo()
    assert sys.modules[f"{host}.mod"].f(1) == 1


@pytest.mark.parametrize("times", matrix.only([200], [200, 1000]))
def test_many_times_on_and_off_leaves_the_same_objects_and_no_growth(host, times):
    features = [
        feature("x", Replace(host.at("f"), fused), Provide(host.at("new"), lambda session: 1)),
        feature("y", Wrap(host.at("f"), passing), Wrap(host.at("C.static"), passing)),
    ]
    before = host.state()
    # The size of this process's sys.modules is not the subject.
    skip = {key.partition(".")[0] for key in sys.modules} - {host.name}
    transaction = transaction_of(*features, skip_modules=skip)

    def turn(times):
        for _ in range(times):
            transaction.apply()
            transaction.undo()
        gc.collect()

    turn(10)
    objects = len(gc.get_objects())
    turn(times)
    assert len(gc.get_objects()) - objects < 50
    tracemalloc.start()
    turn(10)
    start = tracemalloc.get_traced_memory()[0]
    turn(100)
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert grown < 2048
    assert host.state() == before and not hasattr(fused, "__wrapped__")


def per_call(function, number=20_000, repeat=15):
    return min(timeit.repeat("f(1)", globals={"f": function}, number=number, repeat=repeat)) / number


def test_a_wrap_costs_one_python_call_and_a_replacement_none(host):
    plain = per_call(host.mod.f)

    def around(wrapped, session):
        def wrapper(x):
            return wrapped(x)

        return wrapper

    with applied(feature("x", Wrap(host.at("f"), around))):
        assert type(host.mod.f) is types.FunctionType
        assert per_call(host.mod.f) - plain <= 1.5e-6
        depth = []
        sys.setprofile(lambda frame, event, arg: depth.append(event) if event == "call" else None)
        host.mod.f(1)
        sys.setprofile(None)
        assert len(depth) == 2
    with applied(feature("x", Replace(host.at("f"), fused))):
        assert host.mod.f is fused


PATHS = ["f", "g", "cached", "C.method", "C.static", "C.inherited", "C.size", "C"]


def replacement_for(host, path):
    original = functools.reduce(getattr, path.split("."), host.mod)
    if path == "C":
        return type("Better", (host.mod.C,), {})
    if path == "C.size":
        return lambda self: 5
    space = {}
    exec(f"def new{inspect.signature(original)}: return 5", space)
    return space["new"]


def draw_features(host, data):
    features = []
    for name in data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)):
        wrapped = data.draw(st.lists(st.sampled_from(PATHS[:-1]), max_size=3, unique=True))
        patches = [Wrap(host.at(path), passing, order=data.draw(st.integers(-1, 1))) for path in wrapped]
        if name == "a":
            path = data.draw(st.sampled_from(PATHS))
            patches.append(Replace(host.at(path), replacement_for(host, path)))
        if name == "b":
            patches.append(Provide(host.at("new"), lambda session: fused))
        features.append(feature(name, *patches))
    return features


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_sequence_of_apply_and_undo_over_any_features_restores_everything(host, data):
    before = host.state()
    stack, late = [], []
    try:
        for number in range(data.draw(st.integers(1, 6))):
            if stack and data.draw(st.booleans()):
                assert stack.pop().undo() == []
                continue
            stack.append(transaction_of(*draw_features(host, data)))
            stack[-1].apply()
            late.append(types.ModuleType(f"{host.name}.late{number}"))
            vars(late[-1]).update({name: value for name, value in vars(host.mod).items() if name in PATHS})
            sys.modules[late[-1].__name__] = late[-1]
    finally:  # a draw may end the example anywhere
        left = [text for transaction in reversed(stack) for text in transaction.undo()]
        for module in late:
            del sys.modules[module.__name__]
    assert left == [] and host.state() == before
    for module in late:
        assert all(value is vars(host.mod)[name] for name, value in vars(module).items() if name in PATHS)
