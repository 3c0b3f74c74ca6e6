"""The three forms of a report say what the record holds, row by row and without harm."""

from __future__ import annotations

import html
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite.bench import output, plots, report, tables, wording
from tests.harness import bench_reports
from tests.harness.bench_reports import EVERY, SCRIPT

pytest.importorskip("rich")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

NAMES = pytest.mark.parametrize("name", sorted(EVERY))
PLOTS = {"time.png": "<svg></svg>"}


class Page(HTMLParser):
    """The text of a page and the tags in it, outside of its style sheet."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.in_style = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if not self.in_style:
            self.parts.append(data)


def folded(text: str) -> str:
    return " ".join(text.split())


def forms(record: dict[str, Any]) -> Iterator[str]:
    """The text of all three forms, blanks folded, the markup of Markdown undone."""
    yield folded(report.text(record, 5000, False))
    yield folded(re.sub(r"\\(\W|_)", r"\1", html.unescape(report.markdown(record, PLOTS))))
    yield folded(" ".join(Page(report.html(record, PLOTS)).parts))


@pytest.mark.parametrize(
    ("name", "tone", "said"),
    [
        ("full", "good", ["use_flash_attn is 1.22x as fast as off (95 % interval 1.20 to 1.24, 3 pairs)."]),
        (
            "broken",
            "",
            [
                "all was 0.95x as fast as off in its only pair of runs, which may be noise.",
                "use_flash_attn, run 3 crashed: out of memory <b>in</b> step 3 (logs/run-3.log)",
                "all, run 2 hung: no step for 1800 s (logs/run-2.log)",
                "RuntimeError: </pre><script>alert('log')</script> ``` out | of memory",
            ],
        ),
        ("single", "", ["use_flash_attn was 1.22x as fast as off in its only pair of runs, which may be noise."]),
        (
            "noise",
            "",
            ["use_fused_rmsnorm is as fast as off within the noise: 1.007x (95 % interval 0.994 to 1.020, 3"],
        ),
        (
            "slower",
            "bad",
            ["use_flash_attn, the fastest arm, is slower than off: 0.80x as fast (95 % interval 0.75 to"],
        ),
        ("too_few", "", ["Too few runs to tell whether use_flash_attn is faster than off: 0.91x to 5.00x in 2 pairs;"]),
        ("diverged", "bad", ["Every arm that was compared trains differently from off."]),
        ("operators", "bad", ["1 of 3 cases are slower than in the earlier run. mindspeed_lite reaches 87.0 % of the"]),
    ],
)
def test_the_headline_and_what_is_no_table(name: str, tone: str, said: list[str]) -> None:
    record = EVERY[name]()
    for form in forms(record):
        assert not [text for text in (*said, record["title"], *record["command"][:1]) if text not in form]
    assert report.view(record).tone == tone


def rows_of(record: dict[str, Any]) -> dict[str, list[str]]:
    """By title the rows of every table of the report, cells separated by ` | `."""
    view = report.view(record)
    return {table.title: [" | ".join(row) for row in table.rows] for table in (*view.summary, *view.details)}


@pytest.mark.parametrize(
    ("name", "title", "rows"),
    [
        (
            "full",
            "Compared with off",
            [
                "use_flash_attn | 1.22x (1.20 to 1.24), faster | 0.710x (0.708 to 0.712), smaller"
                " | 1.010x (0.980 to 1.040), inside the noise | agrees | steady",
                "use_fused_rmsnorm | 1.007x (0.994 to 1.020), inside the noise"
                " | 1.000x (0.999 to 1.001), inside the noise"
                " | 1.010x (0.980 to 1.040), inside the noise | identical | steady",
            ],
        ),
        (
            "full",
            "Loss",
            [
                "use_flash_attn | ulp | 1.60e-04 | 8 | 1.11x | 3.10e-04 | agrees",
                "use_fused_rmsnorm | ulp | 0 | 8 | 0.00x | 3.10e-04 | identical",
            ],
        ),
        (
            "full",
            "Every arm",
            [
                "off | 412.0 ms | 79,534 tokens/s | 48.5 TFLOP/s | 20.4 % | 21.4 GB | 8.512 s | 3 of 3 ok",
                "use_flash_attn | 338.0 ms | 96,947 tokens/s | 59.2 TFLOP/s | 24.9 % | 15.2 GB | 8.438 s | 3 of 3 ok",
                "use_fused_rmsnorm | 409.0 ms | 80,117 tokens/s | 48.9 TFLOP/s | 20.5 % | 21.4 GB | 8.509 s"
                " | 3 of 3 ok",
                "rounding baseline, float32 | 413.0 ms | 79,341 tokens/s | 48.4 TFLOP/s | 20.3 % | 21.4 GB | 8.513 s"
                " | 3 of 3 ok",
            ],
        ),
        ("full", "Not applied", [f"use_fused_rmsnorm | use_fused_swiglu | {SCRIPT}; the model has no SwiGLU"]),
        (
            "broken",
            "Compared with off",
            [
                "use_flash_attn | - | - | - | - | -",
                "all | 0.95x, one pair | 0.70x, one pair | 1.010x, one pair | agrees"
                " | 2.50 MB a step (off: 0 B), grows",
            ],
        ),
        (
            "broken",
            "Where the time goes",
            [
                "linear | 189.5 ms (46 %) | 152.3 ms (46 %)",
                "attention | 82.40 ms (20 %) | 66.20 ms (20 %)",
                "communication exposed | 16.48 ms (4 %) | 13.24 ms (4 %)",
                "other | 123.6 ms (30 %) | 99.30 ms (30 %)",
                "hidden communication | 24.72 ms (6 %) | 19.86 ms (6 %)",
                "whole profiled step | 412.0 ms | 331.0 ms",
                "step without profiler | 412.0 ms | 331.0 ms",
            ],
        ),
        (
            "too_few",
            "",
            [
                "features | use_flash_attn",
                "peak memory | 1.000x (0.999 to 1.001), inside the noise",
                "loss | agrees: the losses differ within what rounding explains",
            ],
        ),
        ("diverged", "Loss", ["use_flash_attn | ulp | inf | 5 | - | inf | differs"]),
        (
            "operators",
            "rms_norm",
            [
                "4096x1024 bf16, forward | 110.0 us | 87.0 % | 2.91x | 0.98x (too close to tell) | did not run"
                " | 1.010x, same",
                "4096x1024 bf16, forward+backward | 110.0 us | 87.0 % | 2.91x | 0.98x (too close to tell)"
                " | results differ | 1.36x, regression",
            ],
        ),
        (
            "operators",
            "",
            ["cases | 3: 3 too close to tell", "since the earlier run | 1 same and 1 regression"],
        ),
    ],
)  # fmt: skip
def test_the_rows_of_a_table(name: str, title: str, rows: list[str]) -> None:
    assert rows_of(EVERY[name]())[title] == rows


def test_the_conditions_are_all_there() -> None:
    assert rows_of(bench_reports.full())["Conditions"] == [
        "device | NVIDIA H100 80GB HBM3",
        "device type | cuda",
        "world size | 2",
        "threads | 8",
        "versions | torch 2.9.1, megatron-core 0.16.0",
        "affinity | 0-3; 8-9",
        "allocator | expandable_segments:True",
        "variables | OMP_NUM_THREADS 8",
        "ceiling of a process | 620 TFLOP/s, 2.90 TB/s (measured: matmul in bfloat16)",
        "model | layers 12, tokens per step 32,768",
        "parallel | tensor 2, data 1",
        "settings | repeats 3, warmup 2, timeout 1800, mode each, confidence 0.95",
        "measured | 2025-06-01T12:00:00+00:00",
        "files | traces/off.json; time.png; loss.png",
    ]


@NAMES
def test_every_form_has_every_title_cell_and_note(name: str) -> None:
    record = EVERY[name]()
    view = report.view(record)
    shown = (*view.summary, *view.details)
    cells = [cell for table in shown for row in (table.headers, *table.rows) for cell in row]
    titles = [title for table in shown for title in (table.title, table.note)]
    lines = [line for block in view.blocks for line in (block.title, *block.lines)]
    for form in forms(record):
        assert not [each for each in (*titles, *cells, *lines) if folded(each) not in form]
    width: int | None = None
    for line in report.markdown(record, PLOTS).splitlines():
        cells_of_line = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert None in (width, cells_of_line) or width == cells_of_line, line
        width = cells_of_line


@NAMES
@pytest.mark.parametrize("columns", [60, 120])
def test_lines_keep_to_the_width(name: str, columns: int) -> None:
    text = report.text(EVERY[name](), columns, False)
    assert not [line for line in text.splitlines() if len(line) > columns or line != line.rstrip()]
    assert "\x1b" not in text and text.isascii()
    painted = report.text(EVERY[name](), columns, True)
    assert "\x1b[" in painted
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", painted).splitlines()] == text.splitlines()


@pytest.mark.parametrize("name", ["full", "broken", "operators"])
def test_the_files_of_a_report(name: str, tmp_path: Path) -> None:
    """The page fetches and runs nothing, and Markdown shows the same plots as files."""
    record = EVERY[name]()
    drawn = [] if name == "operators" else ["time.png", "loss.png"]
    assert output.write(record, tmp_path) == ["report.json", "report.md", "report.html", *drawn]
    source = (tmp_path / "report.html").read_text()
    page = Page(source)
    assert not {"script", "link", "iframe", "object", "img", "base", "form"} & {tag for tag, _ in page.tags}
    assert not [each for each in ("@import", "http-equiv", "\x1b") if each in source]
    ids = {str(attributes["id"]) for _, attributes in page.tags if "id" in attributes}
    used = {*re.findall(r'href="#([^"]+)"', source), *re.findall(r"url\(#([^)]+)\)", source)}
    assert used <= ids and bool(used) == bool(drawn)
    assert sum(tag == "svg" for tag, _ in page.tags) == len(drawn)
    for each in drawn:
        assert f"![{plots.CAPTIONS[each]}]({each})" in (tmp_path / "report.md").read_text()
        data = (tmp_path / each).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and 1000 < width < 2000 and 200 < height < 3000


def test_plots_show_every_arm_category_and_step() -> None:
    record = wording.cleaned(bench_reports.full())
    with plots.style():
        figure = plots._time(record)
        assert figure is not None
        above, below = figure.axes
        assert [each.get_text() for each in above.get_yticklabels()][::3] == ["off", "rounding baseline, float32"]
        assert sum(len(line.get_xdata()) for line in above.lines) == 4 * 3 * 6
        used = [each.get_text() for each in figure.legends[0].get_texts()]
        assert used == [category for category, share in bench_reports.SHARES.items() if share] and below.patches
        curves = plots._loss(wording.cleaned(bench_reports.diverged()))
        assert curves is not None
        said = [each.get_text() for each in curves.legends[0].get_texts()]
        assert said == ["off", "use_flash_attn (differs)", "rounding baseline, largest"]
        assert [list(line.get_xdata()) for line in curves.axes[0].lines][-1] == [5, 6, 7, 8]


def test_colors_follow_the_verdicts() -> None:
    expected = {
        "1.22x (1.20 to 1.24), faster": "good", "1.30x, larger": "bad", "2.50 MB a step (off: 0 B), grows": "bad",
        "1 of 2 ok, 1 hung": "bad", "0.95x, one pair": "warn", "not judged": "warn", "inside the noise": "", "": "",
    }  # fmt: skip
    assert {cell: tables.tone(cell) for cell in expected} == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (wording.seconds(1.2344), "1.234 s"),
        (wording.seconds(0.0123456), "12.35 ms"),
        (wording.seconds(9.9999e-4), "1.000 ms"),
        (wording.seconds(0), "0 s"),
        (wording.seconds(None), "-"),
        (wording.size(1.523e9), "1.52 GB"),
        (wording.size(999.9e6), "1.00 GB"),
        (wording.rate(3.35e12, "B"), "3.35 TB/s"),
        (wording.tokens(12345.6), "12,346 tokens/s"),
        (wording.percent(0.4123), "41.2 %"),
        (wording.between(0.4058, 0.4202), "405.8 to 420.2 ms"),
        (wording.interval(1.004), "1.004x"),
        (wording.interval(1.24, 1.2, 1.28), "1.24x (1.20 to 1.28)"),
        (wording.cleaned({"\x07a": ("\x1b[31mred\x1b[0m\x07 [bold]", 1)}), {"a": ["red [bold]", 1]}),
        (wording.cleaned("-inf"), -float("inf")),
        (wording.listed(["a", "b", "c"]), "a, b and c"),
    ],
)  # fmt: skip
def test_words(said: object, expected: object) -> None:
    assert said == expected


def test_importing_costs_no_matplotlib() -> None:
    code = (
        "import sys, mindspeed_lite; before = set(sys.modules);"
        "from mindspeed_lite.bench import output, plots, report;"
        "sys.exit(bool({'matplotlib', 'rich', 'jinja2'} & (set(sys.modules) - before)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
