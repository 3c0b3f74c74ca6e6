import copy
import pickle
import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import FrozenInstanceError

import pytest

from mindspeed_lite.engine import (
    Around,
    Catalogue,
    CatalogueError,
    Feature,
    Option,
    OptionError,
    Override,
    Provide,
    Settings,
)
from tests.harness.plans import feature


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Option("-x", "h"),
        lambda: Option("--x y", "h"),
        lambda: Option("--x", "h", type=bool),
        lambda: Option("--x", "h", default=True),
        lambda: Option("--x", "h", upstream="soon"),
        lambda: Override("pkg.mod", len),
        lambda: Override("pkg.mod:", len),
        lambda: Override("pkg mod:f", len),
        lambda: Override("", len),
        lambda: Override("pkg:f", len, versions=">="),
        lambda: Around("pkg:f", len, reads="tp_group"),
        lambda: Around("pkg:1f", len),
        lambda: Provide("pkg.mod", len),
    ],
)
def test_a_wrong_declaration_is_a_value_error_where_it_is_written(wrong):
    with pytest.raises(ValueError):
        wrong()


def test_declarations_are_frozen_and_lists_become_tuples():
    made = feature("x", Override("pkg:f", len, reads=["a", "C.b"]))
    assert isinstance(made.patches, tuple) and isinstance(made.options, tuple)
    assert made.patches[0].reads == ("a", "C.b")
    with pytest.raises(FrozenInstanceError):
        made.name = "y"


def test_a_feature_without_options_has_a_switch_of_its_name_with_its_summary_as_help():
    (option,) = Feature("a_b", "what it does", "ulp", []).options
    assert (option.flag, option.help, option.is_switch) == ("--a-b", "what it does", True)
    assert Feature("a_b", "s", "ulp", [], enabled=lambda settings: True).options == ()


def test_conflicting_arguments_are_those_that_are_set():
    made = feature("x", conflicting_args={"fp8": "no fp8", "cuda_graph_impl": "no graphs", "offload": "no offload"})
    values = {"fp8": "e4m3", "cuda_graph_impl": "none", "offload": False}
    assert made.conflict_reasons(values.get) == ["no fp8"] and made.conflict_reasons({}.get) == []


def test_a_feature_is_enabled_by_its_first_option_or_by_what_it_says():
    options = [Option("--level", "h", default=0), Option("--other", "h")]
    made = feature("x", options=options)
    assert made.is_enabled(Settings({"level": 2, "other": False}))
    assert not made.is_enabled(Settings({"level": 0, "other": False}))
    with pytest.raises(OptionError, match=r"^--other has no effect without --level: add it\.$"):
        made.is_enabled(Settings({"level": 0, "other": True}))
    told = Feature("x", "s", "ulp", [], options, enabled=lambda settings: settings.other)
    assert told.is_enabled(Settings({"level": 0, "other": True}))


@pytest.mark.parametrize("source", [Namespace(a=True, n="7"), {"a": True, "n": 7}])
def test_settings_read_namespaces_and_mappings_and_fill_in_defaults(source):
    options = [Option("--a", "h"), Option("--n", "h", default=1), Option("--c", "h", default="x")]
    settings = Settings.of(options, source)
    assert dict(settings) == {"a": True, "n": 7, "c": "x"}
    assert settings.n == settings["n"] == 7


def test_settings_are_frozen_and_survive_copy_and_pickle():
    settings = Settings({"a": 1})
    for name, says in (("a", ""), ("b", "no option")):
        with pytest.raises(AttributeError, match=says):
            setattr(settings, name, 2) if not says else getattr(settings, name)
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings


def small(text):
    if int(text) > 9:
        raise ArgumentTypeError("too large")
    return int(text)


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        (Option("--a", "h"), "yes", "True or False"),
        (Option("--a", "h"), 1, "True or False"),
        (Option("--a", "h", default=1), "one", "a whole number"),
        (Option("--a", "h", default=1), True, "a whole number"),
        (Option("--a", "h", default=1), 1.5, "a whole number"),
        (Option("--a", "h", default="x"), True, "text"),
        (Option("--a", "h", default="x", choices=["x", "y"]), "z", "one of x, y"),
        (Option("--a", "h", default="x", choices=["x", "y"]), True, "one of x, y"),
        (Option("--a", "h", default=None, type=int, nargs="+"), 3, "a list of values"),
        (Option("--a", "h", default=None, type=int, nargs="+"), "34", "a list of values"),
        (Option("--a", "h", default=None, type=small), "12", "too large"),
    ],
)
def test_a_wrong_value_is_an_option_error_that_names_the_flag(option, value, wanted):
    with pytest.raises(OptionError, match=rf"^--a .*{wanted}, not {value!r}\.$"):
        Settings.of([option], {"a": value})


@pytest.mark.parametrize(
    ("option", "value", "read"),
    [
        (Option("--a", "h", default=1.0), 2, 2),
        (Option("--a", "h", default=None, type=int, nargs="*"), ["3", 4], (3, 4)),
        (Option("--a", "h", default=None), None, None),
        (Option("--a", "h", default="x", choices=["x", "y"]), "y", "y"),
        (Option("--a", "h", default="auto", type=int), "auto", "auto"),
    ],
)
def test_a_right_value_is_read_as_the_flag_would_have_parsed_it(option, value, read):
    assert Settings.of([option], {"a": value}).a == read


MODULE = """
    from mindspeed_lite.engine import Feature, Option
    FEATURE = Feature("{name}", "s", "bitwise", [])
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
