"""Each of the 434 flags: a class, an outcome, an arity, and what a command line with it becomes."""

from __future__ import annotations

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.migration import flags, translate
from mindspeed_lite.migration.rules import RULES
from mindspeed_lite.migration.table import CLASSES, OUTCOMES
from tests.harness.processes import forked

ROWS = list(flags().values())
OURS = {option.flag for option in (*runtime.GENERAL, *runtime.catalogue().options())}
# Others in a command with which a rule has something to do, and the value it is given.
BESIDE = {
    "--beta-fast": ("32", "--multi-latent-attention"),
    "--beta-slow": ("1", "--multi-latent-attention"),
    "--rope-scaling-beta-fast": ("32", "--multi-latent-attention"),
    "--rope-scaling-beta-slow": ("1", "--multi-latent-attention"),
    "--rope-scaling-original-max-position-embeddings": ("4096", "--multi-latent-attention"),
    "--original-max-position-embeddings": ("4096.0", "--multi-head-latent-attention"),
    "--rope-scaling-type": ("yarn", "--multi-latent-attention"),
    "--rope-scaling-factor": ("40", "--multi-latent-attention --rope-scaling-type yarn"),
    "--num-layers": ("4", "--noop-layers 3"),
    "--noop-layers": ("3", "--num-layers 4 --pipeline-model-parallel-size 2"),
    "--num-layers-per-virtual-pipeline-stage": ("1", "--num-layers 4 --noop-layers 3"),
    "--num-layers-per-virtual-pipeline-stag": ("1", ""),
    "--pipeline-num-transformer-layers": ("[[1],[2]]", "--num-layers 3 --pipeline-model-parallel-size 2"),
    "--num-layer-list": ("1,2", "--pipeline-model-parallel-size 2"),
    "--first-k-dense-replace": ("1", "--num-layers 4 --num-experts 2"),
    "--moe-layer-freq": ("-1", ""),
    "--n-shared-experts": ("2", "--moe-ffn-hidden-size 8"),
    "--moe-router-load-balancing-type": ("noaux_tc", ""),
    "--moe-token-dispatcher-type": ("alltoall_seq", ""),
    "--tokenizer-type": ("PretrainedFromHF", ""),
    "--spec": ("mindspeed_llm.x", ""),
    "--transformer-impl": ("transformer_engine", "--norm-topk-prob"),
    "--coc-fused-kernel": ("", "--norm-topk-prob"),
    "--no-gradient-accumulation-fusion": ("", "--gemm-gradient-accumulation-fusion"),
    "--comm-overlap-type": ("coc", ""),
    "--optimizer-selection": ("fused_adamw", ""),
    "--loss-compute-mode": ("chunk", ""),
    "--sliding-window": ("128", ""),
}
# A command in which no condition says that a flag asks for nothing.
BUSY = (
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--num-experts 8"
).split()


def given(row, value="7"):
    """The words of one flag."""
    return [row.flag, *([value] if row.values != "0" else [])]


def outcome(words, flag, known=None, **more):
    """(outcome, words in its place, line) of one flag of a command."""
    found = translate(words, known, **more)
    step = next(each for each in found.steps if each.use.flag == flag)
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


def test_the_table_is_whole():
    assert len(ROWS) == 434
    assert {row.kind for row in ROWS} == set(CLASSES) and {row.outcome for row in ROWS} == set(OUTCOMES)
    assert set(RULES) == {row.flag for row in ROWS if row.outcome == "rule"}
    for row in ROWS:
        assert row.values in ("0", "1", "+"), row.flag
        assert row.note, row.flag
        has_words = row.outcome in ("rename", "write", "choose", "built-in")
        assert bool(row.words) == has_words or row.words.startswith("!"), row.flag
        assert not row.idle or row.outcome in ("skip", "refuse") or row.idle == ("shared",), row.flag
        for each in row.idle:
            assert each in ("cp=1", "pp=1", "vpp=1", "dense", "shared") or each.startswith(("no:--", "value:")), (
                row.flag
            )


def test_what_the_table_points_at_exists(megatron_flags):
    targets = {
        word for row in ROWS if row.outcome in ("rename", "write") for word in row.words.split() if word[:2] == "--"
    }
    assert targets <= megatron_flags
    same = {row.flag for row in ROWS if row.kind == "same"}
    assert same <= OURS | {"--use-flash-attn"}
    assert {row.flag for row in ROWS if "shared" in row.idle} - {"--muon-nesterov"} <= megatron_flags


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_every_flag_has_its_outcome(row, megatron_flags):
    value, beside = BESIDE.get(row.flag, ("7", ""))
    if row.outcome in ("rule", "choose", "built-in"):
        found, words, line = outcome([*given(row, value), *beside.split()], row.flag, megatron_flags, device="cpu")
        if row.flag in ("--muon-nesterov",):
            assert found == "kept"
            assert outcome([row.flag], row.flag, megatron_flags - {row.flag} | {"--muon-use-nesterov"})[1] == [
                "--muon-use-nesterov"
            ]
            return
        assert found in ("translated", "not needed", "skipped"), line
        assert line.startswith(row.flag) and words != given(row, value)
        assert all(word in megatron_flags for word in words if word.startswith("--"))
        return
    busy = [*BUSY, *(f"{each[3:]}" for each in row.idle if each.startswith("no:"))]
    command = [*given(row), *busy, "--bf16"]
    found, words, line = outcome(command, row.flag, megatron_flags)
    expected = {"keep": "kept", "rename": "translated", "write": "translated", "drop": "not needed",
                "launcher": "not needed", "skip": "skipped", "refuse": "refused"}[row.outcome]  # fmt: skip
    # Flags that Megatron or a feature of ours has by now are not translated at all.
    if row.flag in megatron_flags:
        assert (found, words, line) == ("kept", given(row), "")
        assert not row.words or row.words.startswith("!")
    else:
        assert found == expected, line
        assert line.startswith(row.flag) and "\n" not in line
    if found == "refused":
        assert "Instead: " in line or "Leave it out" in line
        assert outcome(["--mindspeed-lite-strict", *command], row.flag, megatron_flags)[0] == "refused"
    if found == "skipped":
        assert "The training goes on without it" in line
        assert outcome(["--mindspeed-lite-strict", *command], row.flag, megatron_flags)[0] == "refused"
    if row.outcome in ("rename", "write"):
        assert words == [*row.words.split(), *(["7"] if row.outcome == "rename" else [])]
    # Its value, and nothing else, goes with it.
    others = translate([*busy, "--bf16"], megatron_flags).accepted
    assert translate(command, megatron_flags).accepted == (*(words if found != "refused" else ()), *others)


IDLE = [(row, each) for row in ROWS for each in row.idle if each != "shared"]


@pytest.mark.parametrize(("row", "condition"), IDLE, ids=[f"{row.flag}-{each}" for row, each in IDLE])
def test_a_flag_that_asks_for_nothing_is_accepted(row, condition):
    parents = [each[3:] for each in row.idle if each.startswith("no:") and each != condition]
    off = {"cp=1": BUSY[:2], "pp=1": BUSY[2:4], "vpp=1": BUSY[4:6], "dense": BUSY[6:]}.get(condition, [])
    pairs = [BUSY[place : place + 2] for place in range(0, len(BUSY), 2)]
    words = [word for pair in pairs if pair != off for word in pair]
    value = condition.partition(":")[2] if condition.startswith("value:") else "7"
    known = frozenset({"--mindspeed-lite-strict"})
    found, left, line = outcome([*words, *parents, *given(row, value)], row.flag, known)
    assert (found, left) == ("not needed", []), line
    busy = [*BUSY, *parents, *([condition[3:]] if condition.startswith("no:") else []), *given(row)]
    assert outcome(busy, row.flag, known)[0] in ("skipped", "refused")


VALUES = [(row, value) for row in ROWS if row.words.startswith("!") for value in row.words[1:].split("|")]


@pytest.mark.parametrize(("row", "value"), VALUES, ids=[f"{row.flag}-{value}" for row, value in VALUES])
def test_values_that_are_mindspeeds_alone_are_one_line(row, value):
    known = frozenset({row.flag})
    found, _, line = outcome([row.flag, value, "--norm-topk-prob"], row.flag, known)
    assert found == "refused" and line.startswith(f"{row.flag} {value}: ")
    assert outcome([row.flag, "7", "--norm-topk-prob"], row.flag, known)[0] == "kept"
