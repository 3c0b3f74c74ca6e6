"""Rows of features, a layout and options, off against on: some fixed, some drawn by date, and faults to be found."""

from __future__ import annotations

import datetime
import shlex
import time
from collections.abc import Callable

import pytest

from tests.harness import checkouts, matrix
from tests.harness.training import Trainer
from tools.pairs.__main__ import Search, main
from tools.pairs.draw import Drawn
from tools.pairs.rows import OPTIONS, TOKENS, Row, name_of
from tools.pairs.train import Bench

FIXED = [
    "tp2_sp,gqa,fp16:use_flash_attn,use_ascend_coc,recompute_activation_function,swap_attention",
    "ep2,fp32,capacity:moe_grouped_gemm,moe_permute_fusion,use_fused_swiglu,moe_zero_memory=level0",
]


@pytest.fixture
def trained(trainer: Callable[[str], Trainer]) -> Trainer:
    return trainer(checkouts.installed())


@pytest.mark.parametrize("text", matrix.only(FIXED[:1], FIXED))
def test_it_trains_as_without_its_features(trained: Trainer, text: str) -> None:
    row = Row.of(text)
    verdict = Bench(trained).judge(row)
    assert not verdict.kind, f"{verdict.kind}: {verdict.text}"
    assert verdict.applied >= {*map(name_of, row.features)}


def test_rows_of_the_day_train_as_without_their_features(trained: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Bench(trained)
    search = Search(bench, Drawn(datetime.date.today().toordinal(), bench), shrinks=True, verbose=True)
    search.go_on(time.monotonic() + 60, 2)
    assert not search.findings, capfd.readouterr().out


FAULTS = [
    ("norms_are_one_percent_off", ",use_fused_embedding", "single:use_fused_rmsnorm", "differs: the first gradient"),
    ("activations_lose_a_bit", "", "single:recompute_activation_function", "differs: step 0: "),
    ("a_norm_ends_the_process", "", "single:use_fused_rmsnorm", "crashes: a rank ended with SIGABRT"),
]


@pytest.mark.parametrize(("fault", "drawn", "row", "words"), matrix.only(FAULTS[:1], FAULTS))
def test_a_planted_fault_is_found_and_its_command_repeats_it(
    trained: Trainer, fault: str, drawn: str, row: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(trained, f"tests.harness.planted:{fault}")
    search = Search(bench, Drawn(1, bench), shrinks=bool(drawn), verbose=False)
    search.try_row(Row.of(row + drawn))
    said = capfd.readouterr().out
    assert search.findings == 1 and f"FINDING {words}" in said, said
    command = shlex.join(["python", "-m", "tools.pairs", "--row", row, "--plant", bench.plant])
    assert f"again: {command}\n" in said


def test_a_row_is_its_own_text() -> None:
    for text in (*FIXED, "single:", "pp2:" + ",".join(TOKENS), "pp2," + ",".join(OPTIONS) + ":"):
        assert str(Row.of(text)) == text
    assert "--fp16" in Row.of(FIXED[0]).arguments and "--bf16" not in Row.of(FIXED[0]).arguments


@pytest.mark.parametrize(
    ("text", "wrong"), [("double:", "double"), ("single,fp8:", "fp8"), ("single:use_it", "use_it")]
)
def test_a_wrong_row_is_one_line(text: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--row", text])
    assert f"--row: '{wrong}' is none of" in capsys.readouterr().err
