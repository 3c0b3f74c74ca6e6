"""Reasons of Megatron arguments that a feature cannot work with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Option, OptionError, Settings
from mindspeed_lite.patches._shared.conditions import (
    _yaml_sections,
    conflict_reasons,
    explicitly_disabled_reasons,
    fsdp_reasons,
    given_flags,
    reenable_default,
    require_first,
)

TABLE = {"fp8": "other outputs", "cuda_graph_impl": "recorded once", "cpu_offloading": "moved away"}


@pytest.mark.parametrize(
    "given, reasons",
    [
        ({}, []),
        ({"fp8": None, "cuda_graph_impl": "none", "cpu_offloading": False}, []),
        ({"fp8": "e4m3", "cuda_graph_impl": "local"}, ["other outputs", "recorded once"]),
        ({"cpu_offloading": True, "unknown": True}, ["moved away"]),
    ],
)
def test_only_what_is_set_gives_its_reason(given, reasons):
    assert conflict_reasons(TABLE, given.get) == reasons


def test_each_flag_of_fsdp_is_named():
    args = {"use_megatron_fsdp": True, "use_custom_fsdp": True, "use_torch_fsdp2": False}
    found = fsdp_reasons(Context(Settings({}), "cpu", {}, args), "gathers by itself")
    assert found == ["--use-megatron-fsdp gathers by itself", "--use-custom-fsdp gathers by itself"]


OPTIONS = (
    Option("--number", help="A number.", default=3, type=int),
    Option("--share", help="A share.", default=None, type=float),
    Option("--switch", help="A switch."),
)


def test_those_at_their_default_are_left_out_and_the_rest_is_written_as_given():
    assert given_flags(OPTIONS, Settings.of(OPTIONS, {})) == []
    assert given_flags(OPTIONS, Settings.of(OPTIONS, {"number": 3, "share": None, "switch": False})) == []
    found = given_flags(OPTIONS, Settings.of(OPTIONS, {"number": 4, "share": 0.0, "switch": True}))
    assert found == ["--number 4", "--share 0", "--switch"]


def test_flags_that_do_nothing_alone_are_refused():
    options = (OPTIONS[2], *OPTIONS[:2])
    for given in ({}, {"switch": True}, {"switch": True, "number": 4}):
        require_first(options, Settings.of(options, given))
    with pytest.raises(OptionError, match=r"^--number 4 --share 0\.5 has no effect without --switch: add it$"):
        require_first(options, Settings.of(options, {"number": 4, "share": 0.5}))


def arguments(explicit=(), **host_args):
    return Context(Settings({}), "cpu", {}, host_args, frozenset(explicit))


disabled = explicitly_disabled_reasons


def test_only_a_flag_of_the_user_counts():
    assert disabled(arguments(), "fusion", "--no-fusion") == []
    # Megatron's default, or what we have switched it to.
    assert disabled(arguments(fusion=False), "fusion", "--no-fusion") == []
    assert disabled(arguments(["fusion"], fusion=True), "fusion", "--no-fusion") == []
    assert disabled(arguments(["fusion"], fusion=False), "fusion", "--no-fusion") == ["--no-fusion is given"]


def test_a_section_of_a_yaml_file_counts_too():
    said = arguments(language_model=SimpleNamespace(fusion=False), model_parallel=SimpleNamespace(fusion=True))
    (reason,) = disabled(said, "fusion", "--no-fusion")
    assert "`fusion` is false" in reason and "YAML" in reason and len(_yaml_sections(said)) == 2
    assert disabled(arguments(language_model=SimpleNamespace()), "fusion", "--no-fusion") == []
    assert _yaml_sections(arguments()) == []


def test_the_argument_is_kept_on_where_the_script_has_it():
    assert reenable_default(arguments(fusion=False), "fusion") == {"fusion": True}
    assert reenable_default(arguments(language_model=SimpleNamespace()), "fusion") == {}
    assert reenable_default(Context(Settings({}), "cpu", {}), "fusion") == {}
