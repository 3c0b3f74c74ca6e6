"""Reasons of Megatron arguments that a feature cannot work with."""

from __future__ import annotations

from types import SimpleNamespace

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._shared.conditions import (
    _yaml_sections,
    not_disabled,
    reenable_default,
)


def arguments(explicit=(), **host_args):
    return Context(Settings({}), "cpu", {}, host_args, frozenset(explicit))


def disabled(context, argument="fusion", flag="--no-fusion"):
    return not_disabled(argument, flag)(context)


def test_only_a_flag_of_the_user_counts():
    assert disabled(arguments()) == []
    # Megatron's default, or what we have switched it to.
    assert disabled(arguments(fusion=False)) == []
    assert disabled(arguments(["fusion"], fusion=True)) == []
    assert disabled(arguments(["fusion"], fusion=False)) == ["--no-fusion is given"]


def test_a_section_of_a_yaml_file_counts_too():
    said = arguments(language_model=SimpleNamespace(fusion=False), model_parallel=SimpleNamespace(fusion=True))
    (reason,) = disabled(said)
    assert "`fusion` is false" in reason and "YAML" in reason and len(_yaml_sections(said)) == 2
    assert disabled(arguments(language_model=SimpleNamespace())) == []
    assert _yaml_sections(arguments()) == []


def test_the_argument_is_kept_on_where_the_script_has_it():
    again = reenable_default("fusion")
    assert again(arguments(fusion=False)) == {"fusion": True}
    assert again(arguments(language_model=SimpleNamespace())) == again(Context(Settings({}), "cpu", {})) == {}
