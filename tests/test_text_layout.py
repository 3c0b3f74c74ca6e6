"""Text and tables at every width: no line is longer, no word is broken, nothing is lost."""

from __future__ import annotations

import io
import re
import shlex

import pytest

from mindspeed_lite import text_layout
from mindspeed_lite.text_layout import painted, table, wrapped

LONG = "/venv/lib/python3.12/site-packages/megatron/core/optimizer"
SIZES = ("0", "2.11 GB", "4.22 GB", "4.22 GB", "8.45 GB", "13.2 GB (4)", "32.2 GB")
RANKS = (
    "rank stage weights grads main moments activations total".split(),
    [(str(rank), *SIZES) for rank in range(3)],
)
TEXTS = (("", "", ""), [("ok", "a check", "many words that have to be wrapped somewhere " * 3), ("note", "x", LONG)])
LAYOUTS = (
    ("", "layout", "step", "spent"),
    [("1", "TP2 PP4 VPP6 MBS1", "510 ms", "products 53%, vector 15%, rest"), ("2", "TP2", "520 ms", "products 50%")],
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 10_000])
@pytest.mark.parametrize(("headers", "rows"), [RANKS, TEXTS, LAYOUTS])
def test_a_table_keeps_to_the_width_and_every_word(headers, rows, width):
    lines = table(headers, rows, width)
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    shown = "\n".join(lines)
    for word in " ".join(cell for row in (headers, *rows) for cell in row).split():
        assert word in shown or (len(word) > width // 2 and word in "".join(shown.split())), (word, shown)
    colored = table(headers, rows, width, lambda cell: "red" if cell == "ok" else "")
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in colored] == lines


def test_forms_of_a_table():
    assert table(*RANKS, 80)[:2] == [
        "rank  stage  weights    grads     main  moments  activations    total",
        "   0      0  2.11 GB  4.22 GB  4.22 GB  8.45 GB  13.2 GB (4)  32.2 GB",
    ]
    turned = table(*RANKS, 60)
    assert turned[0] == "rank                   0            1            2" and len(turned) == 8
    assert table(*TEXTS, 60)[:2] == ["ok  a check", "    many words that have to be wrapped somewhere many words"]
    assert table(*LAYOUTS, 40)[:2] == ["        1", "layout  TP2 PP4 VPP6 MBS1"]
    assert table(("x",), [], 80) == []
    assert table(("", "y"), [("a", "1")], 10_000) == ["   y", "a  1"]


def test_lines_break_between_words_and_long_words_after_a_separator():
    assert wrapped("  one two three", 9) == ["  one two", "  three"]
    assert wrapped(f"see {LONG}", 40) == ["see", "/venv/lib/python3.12/site-packages/", "megatron/core/optimizer"]
    assert wrapped("as  it   is\n\nx", 40) == ["as  it   is", "", "x"]
    assert wrapped("a" * 30, 16, indent=4) == ["    " + "a" * 12, "    " + "a" * 12, "    " + "a" * 6]


def test_a_command_is_the_same_to_a_shell():
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--layout", f"E{'t|' * 25}L", "--use-flash-attn"]
    lines = text_layout.command(f"  {shlex.join(words)}", 40)
    assert len(lines) == 4 and shlex.split("\n".join(lines).replace("\\\n", "")) == words
    assert [len(line) > 40 for line in lines] == [False, False, True, False]


def test_the_width_is_that_of_the_terminal_within_bounds(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert text_layout.columns(io.StringIO(), 123) == 123
    for given, expected in (("20", 40), ("133", 133), ("999", 200)):
        monkeypatch.setenv("COLUMNS", given)
        assert text_layout.columns(io.StringIO()) == expected


def test_paint():
    assert painted("x", "bold red") == "\x1b[1;31mx\x1b[0m" and painted("x", "") == painted("x", "red", False) == "x"
