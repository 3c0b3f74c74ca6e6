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
from tests.bench import reports as bench_reports
from tests.bench.reports import EVERY

pytest.importorskip("rich")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
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
    yield folded(re.sub(r"\\(\W|_)", r"\1", html.unescape(report.render(record, PLOTS, html=False))))
    yield folded(" ".join(Page(report.render(record, PLOTS, html=True)).parts))


@pytest.mark.parametrize(
    ("name", "tone", "said"),
    [
        ("full", "good", "use_flash_attn is 1.21x as fast as off (95 % interval 1.19 to 1.23, 3 pairs)."),
        ("single", "", "use_flash_attn was 1.22x as fast as off in its only pair of runs, which may be noise."),
        ("noise", "", "as fast as off within the noise: 1.005x (95 % interval 0.978 to 1.033, 3 pairs)."),
        ("slower", "bad", "use_flash_attn, the fastest arm, is slower than off: 0.82x as fast (95 % interval 0.79 to"),
        ("too_few", "", "Too few runs to tell whether use_flash_attn is faster than off: 0.90x to 5.19x in 2 pairs;"),
        ("diverged", "bad", "Every arm that was compared trains differently from off."),
        (
            "operators",
            "",
            "mindspeed_lite is 2.91x as fast as plain PyTorch in the median of 3 cases (2.91x to 2.91x).",
        ),
    ],
)
def test_the_headline(name: str, tone: str, said: str) -> None:
    view = report.view(EVERY[name]())
    assert said in view.headline and view.tone == tone


@pytest.mark.parametrize("name", ["full", "broken", "diverged", "operators"])
def test_the_text_is_that_of_the_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    """`pytest --update` writes the files anew."""
    text, golden = report.text(EVERY[name](), 200, False), ROOT / "tests" / "golden" / f"report-{name}.txt"
    if request.config.getoption("--update"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", ["full", "broken", "operators"])
def test_every_form_has_every_title_cell_and_note(name: str) -> None:
    record = EVERY[name]()
    view = report.view(record)
    shown = (*view.summary, *view.details)
    cells = [cell for table in shown for row in (table.headers, *table.rows) for cell in row]
    titles = [title for table in shown for title in (table.title, table.note)]
    lines = [line for title, block in view.blocks for line in (title, *block)]
    for form in forms(record):
        assert not [each for each in (*titles, *cells, *lines) if folded(each) not in form]
    width: int | None = None
    for line in report.render(record, PLOTS, html=False).splitlines():
        cells_of_line = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert None in (width, cells_of_line) or width == cells_of_line, line
        width = cells_of_line


@pytest.mark.parametrize("name", ["broken", "crowd", "operators"])
def test_lines_keep_to_the_width(name: str) -> None:
    text = report.text(EVERY[name](), 60, False)
    assert not [line for line in text.splitlines() if len(line) > 60 or line != line.rstrip()]
    assert "\x1b" not in text and text.isascii()
    painted = report.text(EVERY[name](), 60, True)
    assert "\x1b[" in painted
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", painted).splitlines()] == text.splitlines()


@pytest.mark.parametrize("name", ["full", "operators"])
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
        above, memory, below = figure.axes
        assert len(memory.patches) == 4
        assert [each.get_text() for each in above.get_yticklabels()][::3] == ["off", "rounding baseline, float32"]
        assert sum(len(line.get_xdata()) for line in above.lines) == (3 * 3 + 1) * 6
        used = [each.get_text() for each in figure.legends[0].get_texts()]
        assert used == [category for category, share in bench_reports.SHARES.items() if share] and below.patches
        curves = plots._loss(wording.cleaned(EVERY["diverged"]()))
        assert curves is not None
        said = [each.get_text() for each in curves.legends[0].get_texts()]
        assert said == ["off", "use_flash_attn (differs)", "rounding baseline, largest"]
        assert [list(line.get_xdata()) for line in curves.axes[0].lines][-1] == [5, 6, 7, 8]


def test_the_breakdown_of_a_disturbed_profile_is_not_shown() -> None:
    record = EVERY["full"]()
    arm = record["arms"][1]
    arm["breakdown"]["wall_seconds"] = 2.1 * arm["summary"]["step_seconds"]
    (shown,) = (each for each in report.view(record).details if each.title == "Where the time goes")
    assert arm["name"] not in shown.headers and f"Not shown: {arm['name']}" in shown.note
    with plots.style():
        figure = plots._time(wording.cleaned(record))
        assert figure is not None
        assert len(figure.axes[2].get_yticklabels()) == len(figure.axes[0].get_yticklabels()) - 1


def test_colors_follow_the_verdicts() -> None:
    expected = {
        "1.22x (1.20 to 1.24), faster": "good", "1.30x, larger": "bad", 
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
        (wording.interval(1.004), "1.004x"),
        (wording.interval(1.24, 1.2, 1.28), "1.24x (1.20 to 1.28)"),
        (wording.cleaned({"\x07a": ("\x1b[31mred\x1b[0m\x07 [bold]", 1)}), {"a": ["red [bold]", 1]}),
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
