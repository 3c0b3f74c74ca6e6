"""A user's no to a fusion of Megatron's that is on by default, by flag and in a YAML file."""

from __future__ import annotations

from types import SimpleNamespace

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._refused import kept_on, refused, sections


def context(explicit=(), **host_args):
    return Context(Settings({}), "cpu", {}, host_args, frozenset(explicit))


def test_only_a_flag_of_the_user_counts():
    assert refused(context(), "fusion", "--no-fusion") == []
    # Megatron's default, or what we have switched it to.
    assert refused(context(fusion=False), "fusion", "--no-fusion") == []
    assert refused(context(["fusion"], fusion=True), "fusion", "--no-fusion") == []
    assert refused(context(["fusion"], fusion=False), "fusion", "--no-fusion") == ["--no-fusion is given"]


def test_a_section_of_a_yaml_file_counts_too():
    said = context(language_model=SimpleNamespace(fusion=False), model_parallel=SimpleNamespace(fusion=True))
    (reason,) = refused(said, "fusion", "--no-fusion")
    assert "`fusion` is false" in reason and "YAML" in reason and len(sections(said)) == 2
    assert refused(context(language_model=SimpleNamespace()), "fusion", "--no-fusion") == []
    assert sections(context()) == []


def test_the_argument_is_kept_on_where_the_script_has_it():
    assert kept_on(context(fusion=False), "fusion") == {"fusion": True}
    assert kept_on(context(language_model=SimpleNamespace()), "fusion") == {}
    assert kept_on(Context(Settings({}), "cpu", {}), "fusion") == {}
