"""The flags that a prediction reads are Megatron's and our features', with their defaults."""

from __future__ import annotations

import argparse
import dataclasses

from mindspeed_lite.planner import flags
from mindspeed_lite.planner.arguments import misspelt
from mindspeed_lite.planner.training import TrainingConfig
from tests.harness.processes import forked

TABLES = (flags.ON, flags.OFF, flags.INTEGERS, flags.NUMBERS, flags.TEXTS, flags.LISTS)
# Given in words, or chosen by our layer for defaults (docs/defaults.md).
OTHERS = {"cp_comm_type", "attention_backend", "transformer_impl", "moe_layer_freq", "moe_router_load_balancing_type"}


@forked("megatron")
def test_they_are_in_the_parser_and_have_its_defaults() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from mindspeed_lite import runtime

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    theirs = {option: action for action in parser._actions for option in action.option_strings}
    ours = {option.flag: option for option in (*runtime.GENERAL, *runtime.catalogue().options())}
    for table in (*TABLES, flags.REFUSED):
        assert set(table) <= theirs.keys() | ours.keys(), "a flag that there is not"
    for table in TABLES:
        for flag, name in table.items():
            dest = theirs[flag].dest if flag in theirs else ours[flag].dest
            # Megatron's name for a few differs from its model's.
            assert dest == name or flag in flags.OFF or flag.startswith("--microbatch-group"), flag
    defaults = {action.dest: action.default for action in parser._actions}
    for field in dataclasses.fields(TrainingConfig):
        if field.name in defaults and field.default is not dataclasses.MISSING and field.name not in OTHERS:
            mine, its = field.default, defaults[field.name]
            mine = float(mine[0]) if isinstance(mine, tuple) and mine and its is not None else mine
            assert mine == its or (not mine and its is None), field.name
    assert misspelt([option for option in theirs if option.startswith("--")]) == []


def test_every_name_is_one_of_the_training() -> None:
    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    read_otherwise = {"vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "tokenizer_type"}
    for table in TABLES:
        assert set(table.values()) <= names | read_otherwise
    assert set(flags.TIMED.values()) <= names and not flags.TIMED.keys() & flags.NOT_TIMED.keys()
