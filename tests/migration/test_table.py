"""Each of the 493 flags: a class, an outcome, an arity, and what a command line with it becomes."""

from __future__ import annotations

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.migration import flags, translate
from mindspeed_lite.migration.rules import RULES
from mindspeed_lite.migration.table import CLASSES
from tests.harness.processes import forked

ROWS = list(flags().values())
OURS = {option.flag for option in (*runtime.GENERAL, *runtime.catalogue().options())}
LATENT = "--multi-latent-attention"
# Flags whose outcome depends on the command: a value that is translated, and the flags it needs.
NEEDS = {
    "--rope-scaling-factor": ("40", f"{LATENT} --rope-scaling-type yarn"),
    "--num-layers": ("4", "--noop-layers 3"),
    "--noop-layers": ("3", "--num-layers 4 --pipeline-model-parallel-size 2"),
    "--num-layers-per-virtual-pipeline-stage": ("1", "--num-layers 4 --noop-layers 3"),
    "--num-layers-per-virtual-pipeline-stag": ("1", ""),
    "--pipeline-num-transformer-layers": ("[[1],[2]]", "--num-layers 3 --pipeline-model-parallel-size 2"),
    "--num-layer-list": ("1,2", "--num-layers 3 --pipeline-model-parallel-size 2"),
    "--first-k-dense-replace": ("1", "--num-layers 4 --num-experts 2"),
    "--moe-layer-freq": ("-1", ""),
    "--n-shared-experts": ("2", "--moe-ffn-hidden-size 8"),
    "--moe-router-load-balancing-type": ("noaux_tc", ""),
    "--spec": ("mindspeed_llm.x", ""),
    "--transformer-impl": ("transformer_engine", "--norm-topk-prob"),
    "--moe-router-pre-softmax": ("", "--norm-topk-prob"),
}
# A command in which no condition makes a flag a no-op.
BUSY = (
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--num-experts 8"
).split()


def given(row, value="7"):
    flag, _, own = row.flag.partition("=")
    return [flag, *([own or value] if row.values != "0" else [])]


def outcome(words, flag, known=None, **more):
    """(outcome, words in its place, line) of one flag of a command."""
    flag = flag.partition("=")[0]
    step = next(each for each in translate(words, known, **more).steps if each.use.flag == flag)
    return step.outcome, list(step.words), step.line


@pytest.fixture(scope="module")
def megatron_flags(tmp_path_factory):
    """The flags of Megatron's parser with ours, from a process of its own."""
    path = tmp_path_factory.mktemp("parser") / "flags.txt"
    write_flags(path=path)
    return frozenset(path.read_text().split())


@forked("megatron")
def write_flags(path):
    import argparse

    from megatron.training import arguments

    import mindspeed_lite.megatron_adaptor  # noqa: F401

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    path.write_text("\n".join(parser._option_string_actions))


def test_the_table_is_whole(megatron_flags):
    assert len({row.flag.partition("=")[0] for row in ROWS}) == 493
    assert {row.kind for row in ROWS} == set(CLASSES)
    assert set(RULES) == {row.flag for row in ROWS if row.outcome == "rule"}
    for row in ROWS:
        assert row.values in ("0", "1", "+") and row.note, row.flag
        assert bool(row.words) == (row.outcome in ("rename", "write")), row.flag
        assert row.flag.partition("=")[0] in flags(), row.flag
        for each in row.idle:
            known = ("no:--", "with:--", "not:--", "value:")
            assert each in ("cp=1", "pp=1", "vpp=1", "shared") or each.startswith(known), row.flag
            assert not each.startswith("not:--") or row.instead, row.flag
    written = [word for row in ROWS if row.outcome in ("rename", "write") for word in row.words.split()]
    assert {word for word in written if word[:2] == "--"} <= megatron_flags
    assert {row.flag for row in ROWS if row.kind == "same"} <= OURS | {"--use-flash-attn"}
    shared = {row.flag.partition("=")[0] for row in ROWS if "shared" in row.idle}
    assert shared - {"--muon-nesterov"} <= megatron_flags


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_every_flag_has_its_outcome(row, megatron_flags):
    if row.outcome == "rule":
        value, needs = NEEDS.get(row.flag, ("7", ""))
        if row.flag == "--muon-nesterov":
            assert outcome([row.flag], row.flag, megatron_flags)[0] == "kept"
            megatron_flags = megatron_flags - {row.flag} | {"--muon-use-nesterov"}
        found, words, line = outcome([*given(row, value), *needs.split()], row.flag, megatron_flags, device="cpu")
        assert found in ("translated", "not needed", "skipped"), line
        assert line.startswith(row.flag.partition("=")[0]) and words != given(row, value)
        assert_settled([*given(row, value), *needs.split()], megatron_flags)
        assert all(word in megatron_flags for word in words if word.startswith("--"))
        return
    busy = [*BUSY, *(each[3:] for each in row.idle if each.startswith("no:"))]
    command = [*given(row), *busy, "--bf16"]
    found, words, line = outcome(command, row.flag, megatron_flags)
    expected = {"keep": "kept", "rename": "translated", "write": "translated", "drop": "not needed",
                "launcher": "not needed", "skip": "skipped", "refuse": "refused"}[row.outcome]  # fmt: skip
    # Flags that Megatron or a feature of ours has by now are not translated at all.
    if row.flag in megatron_flags:
        assert (found, words, line) == ("kept", given(row), "") and not row.words
    else:
        first = "Megatron does not build" if row.kind == "model" else row.flag.replace("=", " ")
        assert found == expected and line.startswith(first) and "\n" not in line, line
    if found == "refused":
        assert "Instead: " in line or "Leave it out" in line or (row.kind == "model" and row.flag.split("=")[0] in line)
    if found == "skipped":
        assert "The training goes on without it" in line
        assert outcome(["--mindspeed-lite-strict", *command], row.flag, megatron_flags)[0] == "refused"
    if row.outcome == "rename":
        assert words == [row.words, "7"]
    if row.outcome == "write":
        assert words == row.words.replace("{}", "7").split()
    # Its value, and nothing else, goes with it.
    if "--enable-dsa-indexer" in busy:
        return  # its defaults go with the flags that replace them
    others = translate([*busy, "--bf16"], megatron_flags).accepted
    assert translate(command, megatron_flags).accepted == (*(words if found != "refused" else ()), *others)
    assert_settled(command, megatron_flags)


def assert_settled(command, megatron_flags):
    """A translated command is accepted as it is, and refused where the command itself is."""
    for device in ("cpu", "cuda"):
        first = translate(command, megatron_flags, device=device)
        again = translate(first.accepted, megatron_flags, device=device)
        assert again.accepted == first.accepted and not again.refusals, (first.steps, again.steps)
        # A script is translated without a device, and its words are read again at the start.
        of_script = translate(command, megatron_flags)
        started = translate(of_script.accepted, megatron_flags, device=device)
        assert started.accepted == first.accepted and bool(of_script.refusals) == bool(first.refusals)


CONDITIONS = [(row, each) for row in ROWS for each in row.idle if each != "shared"]


@pytest.mark.parametrize(("row", "condition"), CONDITIONS, ids=[f"{row.flag}-{each}" for row, each in CONDITIONS])
def test_a_condition_makes_a_flag_a_no_op(row, condition):
    name, _, text = condition.partition(":")
    parents = [each[3:] for each in row.idle if each.startswith("no:") and each != condition]
    off = {"cp=1": "--context-parallel-size", "pp=1": "--pipeline-model-parallel-size",
           "vpp=1": "--num-virtual-stages-per-pipeline-rank"}.get(condition, text)  # fmt: skip
    pairs = [BUSY[place : place + 2] for place in range(0, len(BUSY), 2)]
    words = [word for pair in pairs if pair[0] != off for word in pair]
    value = text if name == "value" else "7"
    cause = text.split("=") if name in ("with", "not") else []
    known = frozenset({"--mindspeed-lite-strict", *([row.flag] if "shared" in row.idle else [])})
    found, left, line = outcome([*words, *parents, *given(row, value), *cause], row.flag, known)
    assert found == ("refused" if name == "not" else "not needed"), line
    assert left == (given(row) if name == "not" else [])
    busy = [*BUSY, *parents, *([text] if name == "no" and text not in BUSY else []), *given(row)]
    if name not in ("with", "not"):
        assert outcome(busy, row.flag, known)[0] in ("skipped", "refused")
